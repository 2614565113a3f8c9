// Command kernelbench decides whether the kernels are fast enough: it measures
// them against what the processor can do at all, and says for each bar whether
// it is met.
//
//	go run ./engine/kernel/kernelbench [-impl NAME] [-against NAME] [-threads 1,2]
//	    [-rounds N] [-only NAME] [-json FILE]
//
// The base figures are the AVX2 read bandwidth of the buffer that holds the
// weights and the fused multiply-adds that 256-bit registers allow. Weights are
// far larger than any cache and every slice takes other ones than the slice
// before. All measurements of a run are interleaved, a slice of each in turn,
// because the machine's speed drifts by more than the differences that matter; a
// percentage compares medians, which drift alike, where the best of one may have
// had a moment of quiet that the other had not. With -against every kernel is also
// measured in another form, in the same rounds; the ratio of the two is the median of
// the rounds' ratios, and its spread their middle half.
//
// Time is the thread's processor time, so that sharing the cores with other
// programs costs accuracy but no bias. With two threads both start each slice
// together and the slower one counts.
//
// Exit status: 0, also when a bar is missed; 1 if it could not measure.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
	"unsafe"

	"deltafin/engine/kernel"
)

// A row of the table: what one slice does, and what it is measured in.
type row struct {
	Name string `json:"name"`
	Unit string `json:"unit"`           // GB/s (1e9 bytes of weights and scales) or GFLOP/s
	Base string `json:"base,omitempty"` // the name of the row that it is a percentage of
	Bar  int    `json:"bar_percent,omitempty"`

	form   string                         // of the kernels; empty if it uses none
	work   float64                        // per slice, in the unit's numerator
	bytes  int                            // of the buffer per slice, and
	slices int                            // how many of them it has
	slice  func(p *kernel.Pool, t, i int) // does slice i on thread t
}

// Result is one row for one number of threads.
type Result struct {
	row
	Threads     int     `json:"threads"`
	Best        float64 `json:"best"`
	Median      float64 `json:"median"`
	Percent     float64 `json:"percent"` // median of base's median
	BestPercent float64 `json:"best_percent"`
	// Ratio is the speed against the other form: lower quartile, median, upper quartile.
	Ratio [3]float64 `json:"ratio"`
}

// Record is what -json writes.
type Record struct {
	Processor string   `json:"processor"`
	Go        string   `json:"go"`
	Form      string   `json:"form"`
	Against   string   `json:"against,omitempty"`
	Rounds    int      `json:"rounds"`
	Weights   int      `json:"weights_bytes"`
	Results   []Result `json:"results"`
}

const (
	read     = "read, 256-bit loads"
	peak256  = "fused multiply-add, 256-bit"
	peak512  = "fused multiply-add, 512-bit"
	gbs      = "GB/s"
	gflops   = "GFLOP/s"
	bufBytes = 192 << 20
)

func main() {
	impl := flag.String("impl", kernel.Active(), "form of the kernels: "+strings.Join(kernel.Implementations(), ", "))
	against := flag.String("against", "", "another form to compare with")
	threads := flag.String("threads", "1,2", "numbers of threads, comma separated")
	rounds := flag.Int("rounds", 60, "slices of each measurement")
	only := flag.String("only", "", "measure only kernels whose name contains this, and the base figures")
	out := flag.String("json", "", "write the record to this file")
	flag.Parse()
	if err := run(*impl, *against, *threads, *only, *rounds, *out); err != nil {
		fmt.Fprintln(os.Stderr, "kernelbench:", err)
		os.Exit(1)
	}
}

func run(impl, against, threads, only string, rounds int, out string) error {
	for _, name := range []string{against, impl} {
		if name == "" {
			continue
		}
		if err := kernel.Use(name); err != nil {
			return err
		}
	}
	if !haveBase {
		return fmt.Errorf("no base figures on %s/%s in this build: run on amd64 without -tags noasm", runtime.GOOS, runtime.GOARCH)
	}
	rows := slices.DeleteFunc(table(), func(r row) bool { return r.Base != r.Name && r.Name != peak512 && !strings.Contains(r.Name, only) })
	var twins []row // of the rows, in their order
	for i := range rows {
		if r := &rows[i]; r.form == "" {
			twins = append(twins, row{})
		} else {
			r.form = impl
			t := *r
			t.form = against
			twins = append(twins, t)
		}
	}
	rec := Record{Processor: processor(), Go: runtime.Version(), Form: impl, Against: against, Rounds: rounds, Weights: bufBytes}
	for _, s := range strings.Split(threads, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > runtime.NumCPU() {
			return fmt.Errorf("-threads %q: want numbers from 1 to %d, comma separated", threads, runtime.NumCPU())
		}
		rec.Results = append(rec.Results, measure(rows, twins, n, rounds)...)
	}
	print(rec)
	if out == "" {
		return nil
	}
	b, err := json.MarshalIndent(rec, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(b, '\n'), 0o644)
}

// table lays matrices of every format over one buffer.
func table() []row {
	buf := weights(bufBytes)
	rng := rand.New(rand.NewPCG(1, 2))
	x := kernel.NewMat(512, 7168)
	for i := range x.Data {
		x.Data[i] = float32(rng.NormFloat64())
	}
	const slice = 6 << 20
	rows := []row{
		{Name: read, Unit: gbs, Base: read, work: slice, bytes: slice, slices: len(buf) / slice, slice: func(_ *kernel.Pool, _, i int) {
			readBytes(&buf[i*slice], slice)
		}},
		{Name: peak256, Unit: gflops, Base: peak256, work: 300_000 * 12 * 8 * 2, slices: 1, slice: func(*kernel.Pool, int, int) { peakFMA256(300_000) }},
	}
	if has512() {
		rows = append(rows, row{Name: peak512, Unit: gflops, Base: peak256, work: 300_000 * 12 * 16 * 2, slices: 1, slice: func(*kernel.Pool, int, int) { peakFMA512(300_000) }})
	}
	for _, c := range []struct {
		f           kernel.Format
		outputs, in int
		rows, bar   int
	}{
		{kernel.MXFP4, 3072, 3584, 1, 54},
		{kernel.BF16, 512, 7168, 1, 92},
		{kernel.Int8, 1024, 7168, 1, 80},
		{kernel.F32, 256, 7168, 1, 0},
		{kernel.MXFP4, 3072, 3584, 2, 0},
		{kernel.MXFP4, 3072, 3584, 4, 50},
		{kernel.MXFP4, 3072, 3584, 8, 0},
		{kernel.MXFP4, 3072, 3584, 16, 68},
		{kernel.MXFP4, 3072, 3584, 64, 68},
		{kernel.BF16, 1536, 7168, 2, 0},
		{kernel.BF16, 1536, 7168, 4, 0},
		{kernel.BF16, 1536, 7168, 6, 0},
		{kernel.BF16, 1536, 7168, 8, 0},
		{kernel.BF16, 1536, 7168, 16, 70},
		{kernel.BF16, 768, 7168, 64, 0},
		{kernel.BF16, 192, 7168, 256, 0},
		{kernel.BF16, 96, 7168, 512, 0},
		{kernel.Int8, 1536, 7168, 4, 0},
		{kernel.Int8, 1536, 7168, 8, 0},
		{kernel.Int8, 1536, 7168, 16, 0},
		{kernel.Int8, 192, 7168, 256, 0},
		{kernel.F32, 1024, 7168, 4, 0},
		{kernel.F32, 1024, 7168, 8, 0},
		{kernel.F32, 1024, 7168, 16, 0},
		{kernel.F32, 192, 7168, 256, 0},
	} {
		ms := matrices(buf, c.f, c.outputs, c.in)
		r := row{form: "any", Name: fmt.Sprintf("%v %dx%d", c.f, c.outputs, c.in), Unit: gbs, Base: read, Bar: c.bar, work: float64(ms[0].Bytes())}
		if c.rows == 1 {
			r.Name += ", 1 row"
		} else {
			r.Name += fmt.Sprintf(", %d rows", c.rows)
			r.Unit, r.Base, r.work = gflops, peak256, float64(2*c.outputs*c.in*c.rows)
		}
		xs := kernel.Mat{Rows: c.rows, Cols: c.in, Stride: x.Stride, Data: x.Data}
		var ys []kernel.Mat
		for range runtime.NumCPU() {
			ys = append(ys, kernel.NewMat(c.rows, c.outputs))
		}
		r.bytes, r.slices = len(ms[0].Data), len(ms)
		r.slice = func(p *kernel.Pool, t, i int) {
			p.MatMul(kernel.Job{Y: ys[t], X: xs, W: ms[i]})
		}
		rows = append(rows, r)
	}
	return append(rows, small(buf, x)...)
}

// small are the kernels that work in the caches, and the state of KDA, which is as
// large as weights.
func small(buf []byte, x kernel.Mat) []row {
	var rows []row
	add := func(name, unit, base string, work float64, f func(p *kernel.Pool, t, i int)) *row {
		rows = append(rows, row{form: "any", Name: name, Unit: unit, Base: base, work: work, slices: 1, slice: f})
		return &rows[len(rows)-1]
	}
	cpus := runtime.NumCPU()
	scratch, out := make([]kernel.Scratch, cpus), make([]kernel.Mat, cpus)
	for t := range out {
		out[t] = kernel.NewMat(256, 512)
	}
	// Latent attention of one row and all heads.
	const heads, latent, rope, nope, positions = 96, 512, 64, 128, 1024
	filled := func(rows, cols int) kernel.Mat {
		m := kernel.NewMat(rows, cols)
		copy(m.Data, x.Data)
		return m
	}
	a := kernel.Attention{Heads: heads, Scale: 0.07, First: positions - 1, Latent: filled(positions, latent), Key: filled(positions, rope)}
	q, qr := filled(heads, latent), filled(heads, rope)
	add(fmt.Sprintf("attend, %d positions", positions), gflops, peak256, heads*positions*2*(2*latent+rope), func(p *kernel.Pool, t, _ int) {
		p.Attend(out[t].Slice(0, heads), q, qr, a)
	})
	// Its absorbed query.
	for _, n := range []int{1, 4, 16, 256} {
		ms, h := matrices(buf, kernel.BF16, nope, latent), max(1, 64/n)
		r := add(fmt.Sprintf("chain bf16 %dx%d, %d rows", nope, latent, n), gflops, peak256, float64(2*h*n*nope*latent), func(_ *kernel.Pool, t, i int) {
			for j := range h {
				kernel.Chain(out[t].Slice(0, n), ms[i*h+j], x.Slice(0, n).ColSlice(0, nope), &scratch[t])
			}
		})
		r.bytes, r.slices = h*2*nope*latent, len(ms)/h
	}
	for _, n := range []int{1, 12} {
		w := kernel.FloatMatrix(32, latent, latent, unsafe.Slice((*float32)(unsafe.Pointer(&buf[0])), 32*latent))
		add(fmt.Sprintf("chain f32 32x%d, %d rows, 64 times", latent, n), gflops, peak256, float64(64*2*n*32*latent), func(_ *kernel.Pool, t, _ int) {
			for range 64 {
				kernel.Chain(out[t].Slice(0, n), &w, x.Slice(0, n).ColSlice(0, 32), &scratch[t])
			}
		})
	}
	// KDA: a head's state is read and written once per token.
	const dim = 128
	decay := kernel.Floats(dim)
	for i := range decay {
		decay[i] = 1 - float32(i)/1024
	}
	states := unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(kernel.Bytes(bufBytes)))), bufBytes/4)
	for i := range states {
		states[i] = 0.25
	}
	for _, again := range []int{1, 16} {
		r := add(fmt.Sprintf("kda %dx%d, 16 heads, %d tokens", dim, dim, again), gbs, read, float64(again*16*4*dim*dim), func(_ *kernel.Pool, t, i int) {
			for h := range 16 {
				s := states[(i*16+h)*dim*dim:][:dim*dim]
				for k := range again {
					v := x.Row(k)[h*3*dim:]
					kernel.KDAStep(s, dim, decay, v[:dim], v[dim:2*dim], v[2*dim:3*dim], 0.5, out[t].Row(h)[:dim])
				}
			}
		})
		r.bytes, r.slices = 16*4*dim*dim, bufBytes/(16*4*dim*dim)
	}
	u, w := x.Row(3)[:3072], x.Row(4)[:3072]
	taps := [][]float32{u, w, x.Row(5)[:3072], x.Row(6)[:3072]}
	for _, e := range []struct {
		name string
		f    func(dst []float32)
	}{
		{"exp", func(d []float32) { kernel.Exp(d, u) }},
		{"sigmoid", func(d []float32) { kernel.Sigmoid(d, u) }},
		{"situ", func(d []float32) { kernel.SiTU(d, u, w, 4, 25) }},
		{"gate", func(d []float32) { kernel.Gate(d, u, w) }},
		{"decay", func(d []float32) { kernel.Decay(d, u, w, 1.5, -5) }},
		{"conv", func(d []float32) { kernel.Conv(d, taps, taps) }},
		{"tanh", func(d []float32) { kernel.Tanh(d, u) }},
		{"add", func(d []float32) { kernel.Add(d, u, w) }},
		{"rmsnorm", func(d []float32) { kernel.RMSNorm(d, u, w, 1e-5) }},
		{"axpy", func(d []float32) { kernel.Axpy(d, u, 1e-9) }},
		{"dot", func(d []float32) { d[0] = kernel.Dot(u, w) }},
	} {
		const times = 256
		add(fmt.Sprintf("%s of %d, %d times", e.name, len(u), times), "G/s", "", float64(times*len(u)), func(_ *kernel.Pool, t, _ int) {
			for range times {
				e.f(out[t].Data[:len(u)])
			}
		})
	}
	return rows
}

// weights fills a buffer with bytes that are normal numbers in every format:
// subnormal ones would measure the processor's slow path.
func weights(n int) []byte {
	b := kernel.Bytes(n)
	rng := rand.New(rand.NewPCG(3, 4))
	for i := 0; i < n; i += 8 {
		*(*uint64)(unsafe.Pointer(&b[i])) = rng.Uint64()&0x81ff81ff81ff81ff | 0x3e003e003e003e00
	}
	return b
}

// matrices cuts the buffer into as many matrices as fit.
func matrices(buf []byte, f kernel.Format, outputs, in int) []*kernel.Matrix {
	size := map[kernel.Format]int{kernel.F32: 8, kernel.BF16: 4, kernel.Int8: 2, kernel.MXFP4: 1}[f] * outputs * in / 2
	n := len(buf) / size
	var ms []*kernel.Matrix
	for i := range n {
		data := buf[i*size:][:size]
		m := &kernel.Matrix{Format: f, Rows: outputs, Cols: in, Stride: in, Data: data}
		switch f {
		case kernel.MXFP4:
			m.Scale = kernel.Bytes(outputs * in / kernel.Lane32)
			for j := range m.Scale {
				m.Scale[j] = 118 + byte(j*7%8)
			}
		case kernel.Int8:
			m.RowScale = kernel.Floats(outputs)
			for j := range m.RowScale {
				m.RowScale[j] = 0.01
			}
		}
		ms = append(ms, m)
	}
	return ms
}

// measure runs rounds slices of every row on n threads, interleaved.
// and as many of the twins that have a form.
func measure(rows, twins []row, n, rounds int) []Result {
	rates, others := make([][]float64, len(rows)), make([][]float64, len(rows))
	took := make([]time.Duration, n)
	var start, done sync.WaitGroup
	type order struct {
		row   *row
		slice int
	}
	orders := make([]chan order, n)
	for t := range n {
		orders[t] = make(chan order)
		go func() {
			runtime.LockOSThread()
			p := kernel.NewPool(1)
			defer p.Close()
			for o := range orders[t] {
				start.Done()
				start.Wait()
				from := threadTime()
				o.row.slice(p, t, o.slice)
				took[t] = threadTime() - from
				done.Done()
			}
		}()
	}
	// Slices go round the buffer, one after the other, whichever row takes them: what
	// a slice reads was last read a whole buffer ago.
	cursor := 0
	once := func(r *row) float64 {
		if r.form != "" {
			_ = kernel.Use(r.form) // run has tried it
		}
		start.Add(n)
		done.Add(n)
		for t := range n {
			next := 0
			if r.bytes > 0 {
				next = (cursor + r.bytes - 1) / r.bytes % r.slices
				cursor = (next + 1) * r.bytes % bufBytes
			}
			orders[t] <- order{r, next}
		}
		done.Wait()
		return float64(n) * r.work / float64(slices.Max(took))
	}
	for round := range rounds + 1 {
		for i := range rows {
			var rate, other float64
			for k := range 2 { // who comes second finds warmer caches
				if (k+round)%2 == 0 {
					rate = once(&rows[i])
				} else if twins[i].form != "" {
					other = once(&twins[i])
				}
			}
			if round > 0 { // the first one warms up
				rates[i], others[i] = append(rates[i], rate), append(others[i], other)
			}
		}
	}
	var results []Result
	base := map[string]Result{}
	for i, r := range rows {
		var ratios []float64
		for k, o := range others[i] {
			if o > 0 {
				ratios = append(ratios, rates[i][k]/o)
			}
		}
		slices.Sort(rates[i])
		res := Result{row: r, Threads: n, Best: rates[i][rounds-1], Median: rates[i][rounds/2]}
		if r.Base == r.Name {
			base[r.Name] = res
		}
		if b, ok := base[r.Base]; ok {
			res.Percent, res.BestPercent = 100*res.Median/b.Median, 100*res.Best/b.Best
		}
		if k := len(ratios); k > 0 {
			slices.Sort(ratios)
			res.Ratio = [3]float64{ratios[k/4], ratios[k/2], ratios[k*3/4]}
		}
		results = append(results, res)
	}
	return results
}

func print(rec Record) {
	fmt.Printf("%s, %s, form %s, %d slices each\n\n", rec.Processor, rec.Go, rec.Form, rec.Rounds)
	w := tabwriter.NewWriter(os.Stdout, 2, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "threads\tkernel\tbest\tmedian\tunit\t% of base\t(of bests)\tto "+rec.Against+"\t")
	for _, r := range rec.Results {
		fmt.Fprintf(w, "%d\t%s\t%.1f\t%.1f\t%s\t%s\t%s\t%s\t\n", r.Threads, r.Name, r.Best, r.Median, r.Unit, percent(r.Percent), percent(r.BestPercent), ratio(r.Ratio))
	}
	w.Flush()
	fmt.Println()
	for _, r := range rec.Results {
		if r.Bar == 0 {
			continue
		}
		verdict := "met"
		if r.Percent < float64(r.Bar) {
			verdict = "NOT MET"
		}
		fmt.Printf("bar: %s, %d thread(s): at least %d%% of %s: %.1f%%: %s\n", r.Name, r.Threads, r.Bar, r.Base, r.Percent, verdict)
	}
}

func percent(p float64) string {
	if p == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f", p)
}

func ratio(r [3]float64) string {
	if r[1] == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f (%.2f to %.2f)", r[1], r[0], r[2])
}

// processor is the model name as the system gives it.
func processor() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err == nil {
		var family, name string
		for _, l := range strings.Split(string(b), "\n") {
			k, v, _ := strings.Cut(l, ":")
			switch strings.TrimSpace(k) {
			case "cpu family":
				family = strings.TrimSpace(v)
			case "model name":
				name = strings.TrimSpace(v)
			}
		}
		if name != "" {
			return name + " (family " + family + ")"
		}
	}
	return runtime.GOARCH
}
