package hub

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
)

// treeEntry is one entry of a hub's list.
type treeEntry struct {
	Type string `json:"type"`
	Path string `json:"path"`
	Size int64  `json:"size"`
	OID  string `json:"oid"`
	LFS  *struct {
		OID  string `json:"oid"`
		Size int64  `json:"size"`
	} `json:"lfs"`
}

func (e *treeEntry) file() File {
	if e.LFS == nil {
		return File{Name: e.Path, Size: e.Size, Git: e.OID}
	}
	return File{Name: e.Path, Size: e.LFS.Size, SHA256: strings.TrimPrefix(e.LFS.OID, "sha256:")}
}

// list asks the sources in turn, with patience, what the revision consists of. A
// revision that is a name, such as main, is first turned into a commit.
func (c *client) list(ctx context.Context, retries int, backoff time.Duration, log func(string)) (*Inventory, error) {
	var last error
	dead := map[*source]bool{}
	for range max(1, retries) {
		for _, s := range c.sources {
			if dead[s] {
				continue
			}
			if err := sleepUntil(ctx, s.ready()); err != nil {
				return nil, err
			}
			inv, err := c.listFrom(ctx, s)
			if err == nil {
				s.worked()
				return inv, nil
			}
			r, ok := errors.AsType[*refusal](err)
			if !ok {
				return nil, err
			}
			last = err
			if dead[s] = r.final; !r.final {
				s.failed(r.wait, c.now(), backoff)
				log(err.Error() + ": tried again")
			}
		}
	}
	return nil, fmt.Errorf("the list of files cannot be had: %w", last)
}

func (c *client) listFrom(ctx context.Context, s *source) (*Inventory, error) {
	if s.plain() {
		return c.listStore(ctx, s)
	}
	api := s.base + "/api/models/" + escapePath(c.repo)
	revision := c.revision
	if len(revision) != 40 || !isHex(revision, 40) {
		var at struct {
			SHA string `json:"sha"`
		}
		if _, err := c.json(ctx, s, api+"/revision/"+url.PathEscape(revision), &at); err != nil {
			return nil, err
		}
		if at.SHA == "" || !isHex(at.SHA, 40) {
			return nil, &refusal{source: s.String(), what: fmt.Sprintf("does not say which commit %q is: give the commit itself as the revision", revision), final: true}
		}
		revision = at.SHA
	}
	inv := &Inventory{Format: inventoryFormat, Repo: c.repo, Revision: revision}
	address := api + "/tree/" + url.PathEscape(revision) + "?recursive=true"
	seen := map[string]bool{}
	for address != "" {
		if seen[address] || !strings.HasPrefix(address, s.origin+"/") {
			return nil, &refusal{source: s.String(), what: "its list of files leads in a circle or elsewhere: use another hub", final: true}
		}
		seen[address] = true
		var page []treeEntry
		next, err := c.json(ctx, s, address, &page)
		if err != nil {
			return nil, err
		}
		for i := range page {
			if page[i].Type == "file" {
				inv.Files = append(inv.Files, page[i].file())
			}
		}
		if len(inv.Files) > fileLimit {
			break // check will say so
		}
		address = next
	}
	slices.SortFunc(inv.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	return inv, inv.check()
}

// listStore reads the record of another store of this program, served as plain files.
func (c *client) listStore(ctx context.Context, s *source) (*Inventory, error) {
	var rec storeRecord
	if _, err := c.json(ctx, s, s.url(c.repo, c.revision, recordName), &rec); err != nil {
		return nil, err
	}
	inv := rec.inventory()
	if err := inv.check(); err != nil {
		return nil, &refusal{source: s.String(), what: recordName, final: true, err: err}
	}
	if inv.Repo != c.repo || c.revision != "" && c.revision != inv.Revision {
		return nil, &refusal{source: s.String(), what: fmt.Sprintf("holds %s at %s, not %s at %s: use another source", inv.Repo, inv.Revision, c.repo, c.revision), final: true}
	}
	return inv, nil
}

// sleepUntil waits on the monotonic clock, so that a clock that is set does not matter.
func sleepUntil(ctx context.Context, at time.Time) error {
	d := time.Until(at)
	if d <= 0 {
		return context.Cause(ctx)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
