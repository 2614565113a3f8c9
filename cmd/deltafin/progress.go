package main

import (
	"io"
	"os"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"
)

// progressDelay is how long work may take before its bar appears.
const progressDelay = 700 * time.Millisecond

// progress shows how far a piece of work is, on a terminal.
type progress struct {
	w     io.Writer // nil: nowhere
	name  string
	bytes bool // the counts are bytes
	began time.Time
	all   *mpb.Progress
	bar   *mpb.Bar
}

func newProgress(w io.Writer, name string, bytes bool) *progress {
	if f, ok := w.(*os.File); !ok || !term.IsTerminal(int(f.Fd())) {
		w = nil
	}
	return &progress{w: w, name: name, bytes: bytes, began: time.Now()}
}

func (p *progress) update(done, of int64) {
	if p.w == nil || p.bar == nil && time.Since(p.began) < progressDelay {
		return
	}
	if p.bar == nil {
		counters := decor.CountersNoUnit("%d of %d")
		if p.bytes {
			counters = decor.Counters(decor.SizeB1000(0), "% .1f of % .1f")
		}
		p.all = mpb.New(mpb.WithOutput(p.w), mpb.WithAutoRefresh())
		p.bar = p.all.AddBar(of, mpb.BarRemoveOnComplete(),
			mpb.PrependDecorators(decor.Name(p.name+" "), counters),
			mpb.AppendDecorators(decor.EwmaETA(decor.ET_STYLE_GO, 30), decor.Name(" left")))
	}
	p.bar.EwmaSetCurrent(done, time.Since(p.began)/time.Duration(max(done, 1)))
}

// done removes the bar; further calls do nothing.
func (p *progress) done() {
	if p.bar != nil {
		p.bar.Abort(true)
		p.all.Wait()
	}
	p.w, p.bar = nil, nil
}
