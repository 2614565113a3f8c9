package hub

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSpansKeepWhatABitmapKeeps(t *testing.T) {
	const size = 64
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		var s spans
		var bits [size]bool
		for range 12 {
			x := span{r.Int64N(size), r.Int64N(size + 1)}
			s = s.add(x)
			for i := x.off; i < x.end; i++ {
				bits[i] = true
			}
			var there spans
			for i := range int64(size) {
				if bits[i] {
					there = append(there, span{i, i + 1})
				}
			}
			n := int64(0)
			for n < size && bits[n] {
				n++
			}
			if s.bytes() != int64(len(there)) || s.prefix() != n {
				t.Fatalf("%v: %d bytes, prefix %d; want %d, %d", s, s.bytes(), s.prefix(), len(there), n)
			}
			q := span{r.Int64N(size), r.Int64N(size + 1)}
			var gaps spans
			for i := q.off; i < q.end; i++ {
				if !bits[i] {
					gaps = gaps.add(span{i, i + 1})
				}
			}
			if d := cmp.Diff(gaps, s.missing(q), cmp.AllowUnexported(span{})); d != "" {
				t.Fatalf("%v missing of %v: %s", s, q, d)
			}
			if s.has(q) != (len(gaps) == 0) {
				t.Fatalf("%v has %v: %v", s, q, s.has(q))
			}
			for i := 1; i < len(s); i++ {
				if s[i].off <= s[i-1].end {
					t.Fatalf("%v touch", s)
				}
			}
		}
	}
}

// The states in between prove each chunk alone, and only the right one in its place.
func TestChainProvesEachChunkAlone(t *testing.T) {
	data := make([]byte, 2*chunkBytes+12345)
	rand.NewChaCha8([32]byte{1}).Read(data)
	f := &File{Size: int64(len(data))}
	h := newHasher(f)
	for h.n < h.size {
		h.write(data[h.n:][:min(h.room(), 1<<20-7)])
	}
	d := h.sum()
	sum := sha256.Sum256(data)
	if want := hex.EncodeToString(sum[:]); d.sha256 != want {
		t.Fatalf("digest %s, want %s", d.sha256, want)
	}
	if !d.chain.fits(f.Size) || len(d.chain) != 2*stateBytes {
		t.Fatalf("chain of %d bytes", len(d.chain))
	}
	holds := func(i int) bool {
		x := chunkSpan(f.Size, i)
		h := d.chain.begin(i)
		h.Write(data[x.off:x.end])
		return d.chain.holds(i, h, d.sha256)
	}
	for _, bad := range []int{-1, 0, chunkBytes - 1, chunkBytes, 2*chunkBytes - 1, len(data) - 1} {
		if bad >= 0 {
			data[bad] ^= 1
		}
		for i := range chunks(f.Size) {
			x := chunkSpan(f.Size, i)
			if want := int64(bad) < x.off || int64(bad) >= x.end; holds(i) != want {
				t.Errorf("byte %d wrong: chunk %d holds is %v", bad, i, !want)
			}
		}
		if bad >= 0 {
			data[bad] ^= 1
		}
	}
}

func TestJournalGivesBackWhatWasEntered(t *testing.T) {
	f := &File{Name: "x", Size: 1000, SHA256: strings.Repeat("ab", 32)}
	path := filepath.Join(t.TempDir(), "j")
	open := func(written int64) *journal {
		t.Helper()
		j, err := openJournal(path, f, written)
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	want := []record{{span: span{500, 700}, crc: 7, sum: true}, {span: span{0, 100}, crc: 8, sum: true}, {span: span{100, 101}, crc: 0, sum: false}}
	j := open(1000)
	for _, r := range append(want, record{span: span{50, 60}, crc: 1, sum: true}) {
		if err := j.add(r); err != nil {
			t.Fatal(err)
		}
	}
	j.close()
	same := func(got, want []record) {
		t.Helper()
		if d := cmp.Diff(want, got, cmp.AllowUnexported(record{}, span{})); d != "" {
			t.Error(d)
		}
	}
	j = open(1000)
	same(j.records, want)
	j.close()

	// A torn last record is as if it had not been begun; the next one follows the good ones.
	b, _ := os.ReadFile(path)
	os.WriteFile(path, b[:len(b)-3], 0o644)
	j = open(1000)
	same(j.records, want[:2])
	j.add(want[2])
	j.close()
	j = open(1000)
	same(j.records, want)
	j.close()

	j = open(600) // the file is shorter than the journal says
	same(j.records, want[1:])
	j.close()

	// What came on demand may be dropped and come again; the last word counts.
	j = open(1000)
	x := record{span: span{100, 200}, crc: 9, sum: true, demand: true, hour: 1<<22 - 1}
	gone := record{span: x.span, dropped: true}
	must(t, j.rewrite(f, want[1:2]))
	j.f.Write(slices.Concat(x.encode(), gone.encode(), gone.encode(), x.encode(), record{span: span{0, 50}, dropped: true}.encode()))
	j.close()
	j = open(1000)
	same(j.records, []record{want[1], x})
	if len(j.dropped) != 0 {
		t.Errorf("%v is dropped and there", j.dropped)
	}
	j.f.Write(gone.encode())
	j.close()
	j = open(1000)
	same(j.records, want[1:2])
	if len(j.dropped) != 1 || j.dropped[0] != x.span {
		t.Errorf("dropped is %v", j.dropped)
	}
	j.close()

	f.Size++ // another file of the same name
	j = open(1001)
	same(j.records, nil)
	j.close()
}

func FuzzJournal(f *testing.F) {
	file := &File{Size: 1 << 20}
	head := journalHeader(file.Size, file.identity())
	f.Add(head)
	f.Add(append(bytes.Clone(head), record{span: span{0, 10}, crc: 3, sum: true}.encode()...))
	f.Add(slices.Concat(head, record{span: span{5, 9}, demand: true, hour: 9}.encode(), record{span: span{5, 9}, dropped: true}.encode()))
	f.Add(append(append(bytes.Clone(head), record{span: span{5, 1 << 20}, crc: 3, sum: true}.encode()...), record{span: span{0, 6}, crc: 3, sum: false}.encode()...))
	f.Fuzz(func(t *testing.T, b []byte) {
		records, have, dropped, keep := parseJournal(b, file.Size, file.identity())
		var n int64
		for _, r := range records {
			n += r.bytes()
		}
		for _, x := range dropped {
			if gone := have.missing(x); len(gone) != 1 || gone[0] != x {
				t.Fatalf("%v was dropped and is there: %v", x, have)
			}
		}
		if have.bytes() != n || n > file.Size || keep > int64(len(b)) {
			t.Fatalf("%d bytes in records, %d in runs, %d of %d kept", n, have.bytes(), keep, len(b))
		}
	})
}

func TestPinnedInventoryIsTheRelease(t *testing.T) {
	inv := Pinned()
	var shards, bytes int64
	for _, f := range inv.Files {
		if strings.HasSuffix(f.Name, ".safetensors") {
			shards++
			bytes += f.Size
		}
	}
	if shards != 96 || bytes != 1560936091448 { // spec B.1
		t.Errorf("%d shards of %d bytes", shards, bytes)
	}
	if !inv.holds(DefaultRepo, "9f62e4e9fffbd0a83ddd60e1c209d828994b3569") || inv.holds(DefaultRepo, "main") {
		t.Error("speaks of the wrong revisions")
	}
}

func TestInventoryRefuses(t *testing.T) {
	ok := File{Name: "a/b.bin", Size: 3, SHA256: strings.Repeat("0f", 32)}
	for what, c := range map[string]struct {
		edit func(*Inventory)
		want string
	}{
		"climbing":        {func(i *Inventory) { i.Files[0].Name = "../x" }, "cannot be stored"},
		"absolute":        {func(i *Inventory) { i.Files[0].Name = "/etc/x" }, "cannot be stored"},
		"backslash":       {func(i *Inventory) { i.Files[0].Name = `a\..\..\x` }, "cannot be stored"},
		"drive":           {func(i *Inventory) { i.Files[0].Name = "C:x" }, "cannot be stored"},
		"control":         {func(i *Inventory) { i.Files[0].Name = "a\x1b[2J" }, "cannot be stored"},
		"trailing dot":    {func(i *Inventory) { i.Files[0].Name = "a." }, "cannot be stored"},
		"our part":        {func(i *Inventory) { i.Files[0].Name = "x.PART" }, "cannot be stored"},
		"our record":      {func(i *Inventory) { i.Files[0].Name = recordName }, "cannot be stored"},
		"twice":           {func(i *Inventory) { i.Files = append(i.Files, File{Name: "A/b.bin"}) }, "twice"},
		"negative":        {func(i *Inventory) { i.Files[0].Size = -1 }, "impossible size"},
		"overflow":        {func(i *Inventory) { i.Files = append(i.Files, File{Name: "c", Size: 1<<63 - 1}) }, "impossible size"},
		"short digest":    {func(i *Inventory) { i.Files[0].SHA256 = "ab" }, "malformed"},
		"no hex":          {func(i *Inventory) { i.Files[0].SHA256 = strings.Repeat("zz", 32) }, "malformed"},
		"unknown version": {func(i *Inventory) { i.Format = 2 }, "format 2"},
	} {
		inv := &Inventory{Format: 1, Files: []File{ok}}
		c.edit(inv)
		b, err := json.Marshal(inv)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseInventory(b); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", what, err, c.want)
		}
	}
}

func TestPinComparesWithTheRelease(t *testing.T) {
	d, e := strings.Repeat("aa", 32), strings.Repeat("bb", 32)
	known := &Inventory{Files: []File{{Name: "a", Size: 5}, {Name: "b", SHA256: d}}}
	inv := &Inventory{Files: []File{{Name: "a", Size: 5, SHA256: e}, {Name: "b", Size: 9, Git: strings.Repeat("1", 40)}, {Name: "c"}}}
	extra, err := inv.pin(known)
	if err != nil || cmp.Diff(extra, []string{"c"}) != "" || inv.Files[1].SHA256 != d {
		t.Errorf("extra %v, error %v, digest %q", extra, err, inv.Files[1].SHA256)
	}
	for want, inv := range map[string]*Inventory{
		"the release has 5":       {Files: []File{{Name: "a", Size: 6}, {Name: "b"}}},
		"another digest":          {Files: []File{{Name: "a", Size: 5}, {Name: "b", SHA256: e}}},
		"lacks b (1 files of the": {Files: []File{{Name: "a", Size: 5}}},
	} {
		if _, err := inv.pin(known); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}

func FuzzRecord(f *testing.F) {
	f.Add(pinnedK3)
	f.Add([]byte(`{"format":1,"repo":"a/b","revision":"c","files":[{"name":"x","size":20000000,"dir":"/mnt/a","verified":3,"chain":"AAAA","chunk":16777216}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parseRecord(b)
		if err != nil {
			return
		}
		for _, x := range r.Files {
			if !filepath.IsLocal(filepath.FromSlash(x.Name)) || x.Chain != nil && !x.Chain.fits(x.Size) {
				t.Fatalf("accepted %+v", x)
			}
		}
	})
}

func FuzzHeaders(f *testing.F) {
	f.Add("bytes 0-5/10", `<https://h/api?cursor=2>; rel="next"`, "120")
	f.Add("bytes */10", `<x>; rel=prev, </y>;rel=next`, "Wed, 21 Oct 2015 07:28:00 GMT")
	f.Add("bytes 5-4/*", "<", "-1")
	at, _ := url.Parse("https://h/api/models")
	f.Fuzz(func(t *testing.T, rang, link, after string) {
		if first, last, total, ok := contentRange(rang); ok && (first < 0 || last < 0 || total < -1) {
			t.Fatalf("%q: %d %d %d", rang, first, last, total)
		}
		nextPage([]string{link}, at)
		if d := retryAfter(after, time.Unix(0, 0)); d < 0 || d > waitLimit {
			t.Fatalf("%q: wait %v", after, d)
		}
		if s := redact("https://u:secret@h/p?" + link); strings.Contains(s, "secret") || strings.Contains(s, "?") {
			t.Fatalf("shows %q", s)
		}
	})
}

func TestHeadersAreRead(t *testing.T) {
	at, _ := url.Parse("https://h/api/x?a=b")
	if got := nextPage([]string{`<https://h/p1>; rel="prev", <?cursor=2>; title=x; rel="next"`}, at); got != "https://h/api/x?cursor=2" {
		t.Errorf("next page is %q", got)
	}
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for h, want := range map[string]time.Duration{
		"7": 7 * time.Second, "": 0, "soon": 0, "-3": 0, "999999": waitLimit,
		now.Add(time.Minute).Format(http.TimeFormat): time.Minute, now.Add(-time.Minute).Format(http.TimeFormat): 0,
	} {
		if got := retryAfter(h, now); got != want {
			t.Errorf("Retry-After %q: %v, want %v", h, got, want)
		}
	}
	type cr struct {
		first, last, total int64
		ok                 bool
	}
	for h, want := range map[string]cr{"bytes 2-5/9": {2, 5, 9, true}, "bytes 2-5/*": {2, 5, -1, true}} {
		if f, l, n, ok := contentRange(h); (cr{f, l, n, ok}) != want {
			t.Errorf("%q: %d %d %d %v", h, f, l, n, ok)
		}
	}
	for _, h := range []string{"", "bytes */9", "bytes 2-/9", "items 2-5/9", "bytes +2-5/9", "bytes 2-5"} {
		if _, _, _, ok := contentRange(h); ok {
			t.Errorf("%q is accepted", h)
		}
	}
}
