package openai

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func stateFiles(t testing.TB, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestConversationsOutliveTheProcess(t *testing.T) {
	m, dir := nano(t), t.TempDir()
	body := `{"messages":[{"role":"user","content":"What is the capital of Japan?"}],"max_tokens":40}`
	s, url := serve(t, m, Options{StateDir: dir})
	first, c := wholeChat(t, url, body)
	s.states.saved.Wait()
	if n := len(stateFiles(t, dir)); n != 3 { // the prompt's last pass, the end of the prompt and of the answer
		t.Fatalf("%d files, want 3: %v", n, stateFiles(t, dir))
	}

	_, url = serve(t, m, Options{StateDir: dir})
	again, c2 := wholeChat(t, url, body)
	if again.Text != first.Text || again.Thinking != first.Thinking || c2.Usage.Details.Cached != c.Usage.Prompt {
		t.Errorf("after a restart %+v with %d of %d tokens known, before it %+v", again, c2.Usage.Details.Cached, c.Usage.Prompt, first)
	}
}

func TestADamagedConversationIsDiscardedWithOneLine(t *testing.T) {
	m, dir := nano(t), t.TempDir()
	body := `{"messages":[{"role":"user","content":"What is the capital of Japan?"}],"reasoning_effort":"none","max_tokens":4}`
	s, url := serve(t, m, Options{StateDir: dir})
	want, _ := wholeChat(t, url, body)
	s.states.saved.Wait()
	files := stateFiles(t, dir)
	spoil := func(name string, at func(size int) int) {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		b[at(len(b))] ^= 1
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name   string
		damage func()
		lines  int
	}{
		{"its values", func() { // found when it is used
			for _, f := range files {
				spoil(f, func(n int) int { return n / 2 })
			}
		}, 1}, // the other one is of the answer's end, which this request has no use for
		{"its beginning", func() {
			for _, f := range files {
				spoil(f, func(int) int { return 60 })
			}
		}, 2},
		{"cut off", func() {
			for _, f := range files {
				os.Truncate(f, 1000)
			}
		}, 2},
		{"left over", func() {
			os.WriteFile(filepath.Join(filepath.Dir(files[0]), ".x"+stateSuffix+".1"), []byte("part"), 0o600)
		}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.damage()
			var log bytes.Buffer
			s, url := serve(t, m, Options{StateDir: dir, Log: logTo(&log)})
			got, _ := wholeChat(t, url, body)
			if got.Text != want.Text {
				t.Errorf("answer %q, want %q", got.Text, want.Text)
			}
			if n := strings.Count(log.String(), "is discarded"); n != tt.lines {
				t.Errorf("%d lines about it, want %d:\n%s", n, tt.lines, log.String())
			}
			s.Drain(context.Background())
			s.states.saved.Wait()
			files = stateFiles(t, dir)
			for _, f := range files {
				if strings.HasPrefix(filepath.Base(f), ".") {
					t.Errorf("%s is still there", f)
				}
			}
		})
	}
}

func TestWhatIsKeptIsBounded(t *testing.T) {
	f, dir := newFake(), t.TempDir()
	st, err := openStates(f, dir, 5000, 1000, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	put := func(n int, ids ...int) {
		st.put(ids, &fakeSession{f: f, ids: ids}, nil, nil)
		st.saved.Wait()
		_, memory, disk, _ := st.sizes()
		if memory > 5000 || disk > 1000 {
			t.Errorf("after %d: %d bytes in memory, %d on disk", n, memory, disk)
		}
	}
	for i := range 60 {
		put(i, 1, 2, i)
	}
	known := func(ids ...int) int {
		_, n, _ := st.longest(ids, 0)
		return n
	}
	if known(1, 2, 59, 7) != 3 || known(1, 2, 58, 7) != 3 || known(1, 2, 0, 7) != 0 {
		t.Error("it is not the oldest that went")
	}
	var size int64
	for _, name := range stateFiles(t, dir) {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
	}
	if _, _, disk, _ := st.sizes(); size != disk || size == 0 {
		t.Errorf("files of %d bytes, accounted for %d", size, disk)
	}
	st.putBriefly([]int{4, 4, 4}, &fakeSession{f: f, ids: []int{4, 4, 4}}, nil)
	// One that went from memory comes back from disk, also in the next process.
	n, _, _, _ := st.sizes()
	st.close()
	st, err = openStates(f, dir, 5000, 1<<20, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer st.close()
	if again, memory, _, _ := st.sizes(); again == 0 || again > n || memory != 0 {
		t.Errorf("%d conversations, %d bytes in memory after opening; %d before", again, memory, n)
	}
	if known(1, 2, 59, 7) != 3 {
		t.Error("the newest did not come back")
	}
	if known(4, 4, 4, 4) != 0 {
		t.Error("a state within an answer was written to disk")
	}
}

func TestTheDeepestKnownBeginningCounts(t *testing.T) {
	f := newFake()
	st, err := openStates(f, "", 1<<20, 0, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer st.close()
	put := func(logits []float32, ids ...int) *state {
		return st.put(ids, &fakeSession{f: f, ids: ids}, logits, nil)
	}
	put(nil, 1, 2)
	put(nil, 1, 2, 3, 4)
	put([]float32{1}, 1, 2, 9)
	for _, tt := range []struct {
		ids  []int
		want int
	}{
		{[]int{1}, 0},
		{[]int{5, 1, 2}, 0},
		{[]int{1, 2}, 0}, // all of it, but not what follows
		{[]int{1, 2, 3}, 2},
		{[]int{1, 2, 3, 5}, 2}, // edited
		{[]int{1, 2, 3, 4, 5}, 4},
		{[]int{1, 2, 9}, 3}, // all of it, and what follows
	} {
		s, n, logits := st.longest(tt.ids, 0)
		if n != tt.want || n > 0 && s.Position() != n || (logits != nil) != (len(tt.ids) == 3 && tt.ids[2] == 9) {
			t.Errorf("%v: %d tokens known, logits %v; want %d", tt.ids, n, logits, tt.want)
		}
	}
	// What takes another's place leaves none of it.
	a := put(nil, 7, 7)
	st.put([]int{7, 7, 7}, &fakeSession{f: f, ids: []int{7, 7, 7}}, nil, a)
	if _, n, _ := st.longest([]int{7, 7, 8}, 0); n != 0 {
		t.Error("the earlier state of a generation is still there")
	}
}

// The process is killed between two turns, at the worst: while it writes.
func TestAKilledServerLosesNoTruth(t *testing.T) {
	dir := t.TempDir()
	turn := func(i int) string {
		return fmt.Sprintf(`{"messages":[{"role":"user","content":"What is the capital of Japan? %s"}],"reasoning_effort":"none","max_tokens":5}`, strings.Repeat("Tell me. ", i))
	}
	_, alone := serve(t, nano(t), Options{})
	rounds := 2
	if *full {
		rounds = 20
	}
	for i := range rounds {
		want, _ := wholeChat(t, alone, turn(i))
		next, _ := wholeChat(t, alone, turn(i)+" ")
		cmd, url := child(t, dir)
		if got, _ := wholeChat(t, url, turn(i)); got.Text != want.Text {
			t.Errorf("round %d: %q, want %q", i, got.Text, want.Text)
		}
		time.Sleep(time.Duration(i%5) * 4 * time.Millisecond)
		cmd.Process.Kill()
		cmd.Wait()
		cmd, url = child(t, dir)
		if got, c := wholeChat(t, url, turn(i)); got.Text != next.Text {
			t.Errorf("round %d after the kill: %q, want %q", i, got.Text, next.Text)
		} else {
			t.Logf("round %d: %d of %d tokens known after the kill", i, c.Usage.Details.Cached, c.Usage.Prompt)
		}
		cmd.Process.Kill()
		cmd.Wait()
	}
}

// child is a server in a process of its own.
func child(t *testing.T, dir string) (*exec.Cmd, string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "OPENAI_TEST_STATES="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + strings.TrimSpace(line)
	eventually(t, "the child is ready", func() bool {
		resp, err := http.Get(url + "/readyz")
		if err != nil {
			return false
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		return resp.StatusCode == 200
	})
	return cmd, url
}

func TestMain(m *testing.M) {
	dir := os.Getenv("OPENAI_TEST_STATES")
	if dir == "" {
		os.Exit(m.Run())
	}
	err := Serve(context.Background(), Options{
		Port: -1, StateDir: dir, Log: slog.New(slog.DiscardHandler),
		Listen: func(a net.Addr) { fmt.Println(a) },
	}, func(context.Context) (Model, error) { return nanoModel() })
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
