package tokenizer

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
)

// readRanks reads the lines "<base64 bytes> <rank>" (spec D.1): ranks count from
// 0 in file order, no token occurs twice, and all 256 single bytes are there, so
// that every text has an encoding.
func (t *Tokenizer) readRanks(model []byte) error {
	if len(model) > maxModelBytes {
		return fmt.Errorf("%d bytes, more than the %d allowed: this is no K3 tokenizer file", len(model), maxModelBytes)
	}
	if len(model) == 0 {
		return fmt.Errorf("the file is empty: fetch it again")
	}
	model = bytes.TrimSuffix(model, []byte("\n"))

	// All tokens share one backing string: the real file has 163584 of them.
	var all []byte
	var ends []int
	strict := base64.StdEncoding.Strict()
	line := 0
	for text := range bytes.SplitSeq(model, []byte("\n")) {
		line++
		coded, rank, ok := bytes.Cut(text, []byte(" "))
		if !ok {
			return fmt.Errorf("line %d: want \"<base64 bytes> <rank>\", found %.60q: fetch the file again", line, text)
		}
		if string(rank) != strconv.Itoa(line-1) {
			return fmt.Errorf("line %d: rank is %.20q, want %d: ranks count from 0 in file order: fetch the file again", line, rank, line-1)
		}
		before := len(all)
		var err error
		// base64 readers pass over line breaks, which would let a stray \r through.
		if bytes.ContainsRune(coded, '\r') {
			err = fmt.Errorf("a carriage return")
		} else {
			all, err = strict.AppendDecode(all, coded)
		}
		if err != nil {
			return fmt.Errorf("line %d: token %.60q is not base64 (%v): fetch the file again", line, coded, err)
		}
		if len(all) == before {
			return fmt.Errorf("line %d: the token is empty: fetch the file again", line)
		}
		ends = append(ends, len(all))
	}

	backing := string(all)
	t.tokens = make([]string, 0, len(ends)+specials)
	t.ranks = make(map[string]int32, len(ends))
	start := 0
	for i, end := range ends {
		token := backing[start:end]
		start = end
		if first, twice := t.ranks[token]; twice {
			return fmt.Errorf("line %d: token %.60q is already on line %d: fetch the file again", i+1, token, first+1)
		}
		t.ranks[token] = int32(i)
		t.tokens = append(t.tokens, token)
		t.longest = max(t.longest, len(token))
	}
	var missing []string
	for b := range 256 {
		rank, ok := t.ranks[string([]byte{byte(b)})]
		if !ok {
			missing = append(missing, fmt.Sprintf("0x%02x", b))
			continue
		}
		t.byteID[b] = rank
	}
	if len(missing) > 0 {
		more := ""
		if len(missing) > 8 {
			missing, more = missing[:8], ", ..."
		}
		return fmt.Errorf("no token for the single bytes %s%s: the file is incomplete, fetch it again",
			strings.Join(missing, ", "), more)
	}
	return nil
}
