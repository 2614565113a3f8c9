package main

import (
	"io"
	"os"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"
)

// progressDelay is how long a prompt may take before its bar appears.
const progressDelay = 700 * time.Millisecond

// progress shows how far the layers of a prompt are, on a terminal.
type progress struct {
	w     io.Writer // nil: nowhere
	began time.Time
	all   *mpb.Progress
	bar   *mpb.Bar
}

func newProgress(w io.Writer) *progress {
	if f, ok := w.(*os.File); !ok || !term.IsTerminal(int(f.Fd())) {
		w = nil
	}
	return &progress{w: w, began: time.Now()}
}

func (p *progress) update(done, of int) {
	if p.w == nil || p.bar == nil && time.Since(p.began) < progressDelay {
		return
	}
	if p.bar == nil {
		p.all = mpb.New(mpb.WithOutput(p.w), mpb.WithAutoRefresh())
		p.bar = p.all.AddBar(int64(of), mpb.BarRemoveOnComplete(),
			mpb.PrependDecorators(decor.Name("prompt: layer "), decor.CountersNoUnit("%d of %d")),
			mpb.AppendDecorators(decor.EwmaETA(decor.ET_STYLE_GO, 30), decor.Name(" left")))
	}
	p.bar.EwmaSetCurrent(int64(done), time.Since(p.began)/time.Duration(done))
}

// done removes the bar; further calls do nothing.
func (p *progress) done() {
	if p.bar != nil {
		p.bar.Abort(true)
		p.all.Wait()
	}
	p.w, p.bar = nil, nil
}
