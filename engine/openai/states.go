package openai

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"deltafin/engine/disk"
)

// states keeps sessions by the tokens that they have been fed, so that a prompt pays
// only for what follows its longest known beginning. Those in memory are bounded by
// their bytes; those on disk by theirs. Whatever is used least recently goes first.
type states struct {
	model Model
	log   *slog.Logger
	limit int64  // bytes of memory
	dir   string // "" for none
	disk  int64  // bytes of files

	mu        sync.Mutex
	entries   []*state
	inMemory  int64
	onDisk    int64
	uses      int64 // clock of lastUse
	discarded int64 // files that were of no use

	save  chan *state
	saved sync.WaitGroup // pending saves
	done  chan struct{}
}

// state is one kept session. Its session is never fed: users fork it.
type state struct {
	ids     []int
	session Session   // nil: on disk only
	logits  []float32 // [vocab] of the last token, or nil
	bytes   int64     // of session and logits
	file    string    // "" unless on disk
	size    int64     // of the file
	lastUse int64
	gone    bool // no longer kept
	brief   bool // never written to disk
}

const (
	stateSuffix = ".k3state"
	// saveQueue bounds the states that wait to be written, which memory holds on to.
	saveQueue = 4
)

// openStates lists what dir holds. Files that cannot be used are removed with one
// line each.
func openStates(m Model, dir string, memory, disk int64, log *slog.Logger) (*states, error) {
	s := &states{model: m, log: log, limit: memory, disk: disk, save: make(chan *state, saveQueue), done: make(chan struct{})}
	if dir != "" {
		// One directory per model, so that none discards another's.
		digest := m.Info().Digest
		s.dir = filepath.Join(dir, hex.EncodeToString(digest[:8]))
		if err := s.list(); err != nil {
			return nil, fmt.Errorf("the state directory cannot be used: %w: give another, or none", err)
		}
	}
	go s.write()
	return s, nil
}

func (s *states) list() error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	files, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	type found struct {
		*state
		at time.Time
	}
	var all []found
	for _, f := range files {
		path := filepath.Join(s.dir, f.Name())
		info, err := f.Info()
		switch {
		case err != nil || !info.Mode().IsRegular():
			continue
		case strings.HasPrefix(f.Name(), ".") && strings.Contains(f.Name(), stateSuffix):
			os.Remove(path) // begun by a process that was killed
			continue
		case !strings.HasSuffix(f.Name(), stateSuffix):
			continue
		}
		ids, err := s.readIDs(path, info.Size())
		if err != nil {
			s.discard(path, err)
			continue
		}
		all = append(all, found{&state{ids: ids, file: path, size: info.Size()}, info.ModTime()})
	}
	slices.SortFunc(all, func(a, b found) int { return a.at.Compare(b.at) })
	for _, f := range all {
		s.uses++
		f.lastUse = s.uses
		s.onDisk += f.size
		s.entries = append(s.entries, f.state)
	}
	s.evict()
	return nil
}

func (s *states) readIDs(path string, size int64) ([]int, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return s.model.ReadIDs(f, size)
}

func (s *states) discard(path string, why error) {
	s.discarded++
	s.log.Warn("a saved conversation is discarded", "file", filepath.Base(path), "why", why)
	os.Remove(path)
}

// longest gives a session that has been fed the longest known beginning of ids, as
// the caller's own, and how many tokens that is; nil if no more than the first beyond are
// known. All of ids is a known beginning only with its logits.
func (s *states) longest(ids []int, beyond int) (session Session, n int, logits []float32) {
	for {
		s.mu.Lock()
		best := s.find(ids, beyond)
		if best == nil {
			s.mu.Unlock()
			return nil, 0, nil
		}
		s.uses++
		best.lastUse = s.uses
		kept, logits, file, size := best.session, best.logits, best.file, best.size
		s.mu.Unlock()
		if kept == nil {
			var err error
			if kept, logits, err = s.load(best, file, size); err != nil {
				s.mu.Lock()
				s.remove(best)
				if !errors.Is(err, fs.ErrNotExist) {
					s.discard(file, err)
				}
				s.mu.Unlock()
				continue
			}
		}
		if len(best.ids) == len(ids) && logits == nil {
			ids = ids[:len(ids)-1] // the next token would not be known
			continue
		}
		return kept.Fork(), len(best.ids), logits
	}
}

// find is the entry with the longest usable beginning of ids.
func (s *states) find(ids []int, beyond int) *state {
	var best *state
	for _, e := range s.entries {
		if len(e.ids) <= beyond || len(e.ids) > len(ids) || best != nil && len(e.ids) <= len(best.ids) || !slices.Equal(e.ids, ids[:len(e.ids)]) {
			continue
		}
		// A state on disk only tells its logits when it is loaded; asking it is better than
		// doing a known prompt again.
		if len(e.ids) == len(ids) && e.logits == nil && e.session != nil {
			continue
		}
		best = e
	}
	return best
}

// load brings a state back from its file of size bytes.
func (s *states) load(e *state, file string, size int64) (Session, []float32, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	session, ids, logits, err := s.model.LoadSession(f, size)
	if err != nil {
		return nil, nil, err
	}
	if !slices.Equal(ids, e.ids) {
		return nil, nil, errors.New("it is not what it was when the server started")
	}
	now := time.Now()
	os.Chtimes(file, now, now) // the order of use outlives the process
	s.mu.Lock()
	defer s.mu.Unlock()
	if !e.gone && e.session == nil {
		e.session, e.logits = session, logits
		e.bytes = session.Bytes() + 4*int64(len(logits))
		s.inMemory += e.bytes
		s.evict()
	}
	return session, logits, nil
}

// put keeps session, which nobody feeds any more, under the tokens that it was fed.
// instead, if not nil, is an earlier state of the same generation that it makes
// superfluous.
func (s *states) put(ids []int, session Session, logits []float32, instead *state) *state {
	return s.keep(&state{ids: slices.Clone(ids), session: session, logits: slices.Clone(logits)}, instead)
}

// putBriefly is put for a state within an answer, which is in memory only: written once
// a minute for hours, states would wear a drive out.
func (s *states) putBriefly(ids []int, session Session, instead *state) *state {
	return s.keep(&state{ids: slices.Clone(ids), session: session, brief: true}, instead)
}

func (s *states) keep(e, instead *state) *state {
	session, logits := e.session, e.logits
	e.bytes = session.Bytes() + 4*int64(len(logits))
	s.mu.Lock()
	defer s.mu.Unlock()
	if instead != nil && !instead.gone {
		s.remove(instead)
		s.unlink(instead)
	}
	s.uses++
	e.lastUse = s.uses
	for _, old := range s.entries {
		if !slices.Equal(old.ids, e.ids) {
			continue
		}
		old.lastUse = s.uses
		if old.session != nil && (old.logits != nil || logits == nil) || old.session == nil && old.file != "" && logits == nil {
			return old // it is as good
		}
		s.remove(old)
		s.unlink(old)
		break
	}
	s.entries = append(s.entries, e)
	s.inMemory += e.bytes
	if s.dir != "" && !e.brief {
		s.saved.Add(1)
		select {
		case s.save <- e:
		default: // the drive is behind: this one stays in memory only
			s.saved.Done()
		}
	}
	s.evict()
	return e
}

// evict keeps memory and disk within their bounds.
func (s *states) evict() {
	oldest := func(ok func(*state) bool) *state {
		var o *state
		for _, e := range s.entries {
			if ok(e) && (o == nil || e.lastUse < o.lastUse) {
				o = e
			}
		}
		return o
	}
	for s.inMemory > s.limit {
		e := oldest(func(e *state) bool { return e.session != nil })
		if e.file == "" {
			s.remove(e)
			continue
		}
		s.inMemory -= e.bytes
		e.session, e.logits, e.bytes = nil, nil, 0
	}
	for s.onDisk > s.disk {
		e := oldest(func(e *state) bool { return e.file != "" })
		s.unlink(e)
		if e.session == nil {
			s.remove(e)
		}
	}
}

// remove forgets a state; its file stays.
func (s *states) remove(e *state) {
	if e.gone {
		return
	}
	e.gone = true
	if i := slices.Index(s.entries, e); i >= 0 {
		s.entries = slices.Delete(s.entries, i, i+1)
	}
	s.inMemory -= e.bytes
	if e.file != "" {
		s.onDisk -= e.size
	}
}

// unlink removes a state's file.
func (s *states) unlink(e *state) {
	if e.file == "" {
		return
	}
	os.Remove(e.file)
	if !e.gone {
		s.onDisk -= e.size
	}
	e.file, e.size = "", 0
}

// write saves states until close.
func (s *states) write() {
	defer close(s.done)
	for e := range s.save {
		s.writeOne(e)
		s.saved.Done()
	}
}

func (s *states) writeOne(e *state) {
	s.mu.Lock()
	session, logits, need := e.session, e.logits, !e.gone && e.session != nil && !e.brief && e.file == ""
	s.mu.Unlock()
	if !need {
		return
	}
	path := filepath.Join(s.dir, stateName(e.ids))
	size, err := disk.Publish(path, 0o600, func(f *os.File) error { return session.Save(f, e.ids, logits) })
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil:
		s.log.Warn("a conversation cannot be saved and is kept in memory only", "why", err)
	case e.gone:
		if !slices.ContainsFunc(s.entries, func(o *state) bool { return o.file == path }) {
			os.Remove(path)
		}
	default:
		e.file, e.size = path, size
		s.onDisk += size
		s.evict()
	}
}

// stateName is a file's name for these tokens.
func stateName(ids []int) string {
	h := sha256.New()
	for _, id := range ids {
		binary.Write(h, binary.LittleEndian, int64(id))
	}
	return hex.EncodeToString(h.Sum(nil)[:16]) + stateSuffix
}

// close ends after everything that is in memory is on disk.
func (s *states) close() {
	close(s.save)
	<-s.done
	if s.dir == "" {
		return
	}
	s.mu.Lock()
	all := slices.Clone(s.entries)
	s.mu.Unlock()
	for _, e := range all {
		s.writeOne(e)
	}
}

// sizes is how many states there are and what they take.
func (s *states) sizes() (n int, memory, disk, discarded int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.entries), s.inMemory, s.onDisk, s.discarded
}
