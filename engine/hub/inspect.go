package hub

// Inspection is what a store's record and a look at its files tell.
type Inspection struct {
	Repo, Revision string
	Files          int
	Bytes          int64    // of all files
	Missing        int64    // of them still to come
	Bad            []Damage // files that are missing, unfinished, or not what they should be by their size
	OnDemand       int      // files that fill on demand
	Uninstalled    bool     // they do, and dense weights are still to come
	Unproven       int      // files whose digest was never compared, or that changed since
}

// Inspect looks at the store in dir and writes nothing, not even a lock; no file of the
// model is read. It returns nil for a directory that deltafin did not fetch. Its error begins
// with dir.
func Inspect(dir string) (*Inspection, error) {
	s, err := openStore(dir, nil)
	if err != nil || s.rec == nil {
		return nil, inDir(dir, err)
	}
	v := &verifier{o: &VerifyOptions{Log: func(string) {}}, s: s, filling: IsStream(s.dir), report: &Report{}}
	r := &Inspection{Repo: s.rec.Repo, Revision: s.rec.Revision, Files: len(s.rec.Files)}
	for i := range s.rec.Files {
		f := &s.rec.Files[i]
		r.Bytes += f.Size
		switch {
		case !v.present(f):
			r.Missing += f.Size - v.s.arrived(f)
		case v.fills(f):
			r.OnDemand++
		case !s.whole(f):
			r.Unproven++
		}
	}
	r.Bad = v.report.Bad
	if v.filling {
		was, err := s.stream()
		r.Uninstalled = err != nil || !was.Installed
	}
	return r, nil
}
