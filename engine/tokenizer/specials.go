package tokenizer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// specials is the number of control tokens after the ranks (spec D.4).
const specials = 256

// readSpecials names the 256 ids after the ranks: as added_tokens_decoder says,
// and "<|reserved_token_ID|>" where it says nothing.
//
// A vocabulary without the chat format's names ("<|open|>" ...) is accepted: raw
// text still works with it, and package chat reports what it lacks when a chat is
// asked for.
func (t *Tokenizer) readSpecials(config []byte) error {
	if len(config) > maxConfigBytes {
		return fmt.Errorf("%d bytes, more than the %d allowed: this is no K3 tokenizer file", len(config), maxConfigBytes)
	}
	var c struct {
		Added      *addedTokens      `json:"added_tokens_decoder"`
		BOS        json.RawMessage   `json:"bos_token"`
		EOS        json.RawMessage   `json:"eos_token"`
		PAD        json.RawMessage   `json:"pad_token"`
		UNK        json.RawMessage   `json:"unk_token"`
		Additional []json.RawMessage `json:"additional_special_tokens"`
	}
	if err := json.Unmarshal(config, &c); err != nil {
		return fmt.Errorf("%w: fetch the file again", err)
	}
	if c.Added == nil {
		return fmt.Errorf("added_tokens_decoder is missing: it names the control tokens, fetch the file again")
	}

	first := len(t.tokens)
	for range specials {
		t.tokens = append(t.tokens, "")
	}
	for _, a := range *c.Added {
		if a.id < first || a.id >= first+specials {
			return fmt.Errorf("added_tokens_decoder: id %d (%.60q) is not among the %d ids after the ranks, %d to %d: the two tokenizer files do not belong together",
				a.id, a.content, specials, first, first+specials-1)
		}
		if t.tokens[a.id] != "" {
			return fmt.Errorf("added_tokens_decoder: id %d occurs twice (%.60q and %.60q): fetch the file again", a.id, t.tokens[a.id], a.content)
		}
		t.tokens[a.id] = a.content
	}
	t.special = make(map[string]int, specials)
	for id := first; id < first+specials; id++ {
		if t.tokens[id] == "" {
			t.tokens[id] = fmt.Sprintf("<|reserved_token_%d|>", id)
		}
		name := t.tokens[id]
		if other, twice := t.special[name]; twice {
			return fmt.Errorf("added_tokens_decoder: ids %d and %d are both named %.60q: fetch the file again", other, id, name)
		}
		t.special[name] = id
	}

	roles := []struct {
		field string
		value json.RawMessage
	}{{"bos_token", c.BOS}, {"eos_token", c.EOS}, {"pad_token", c.PAD}, {"unk_token", c.UNK}}
	for i, v := range c.Additional {
		roles = append(roles, struct {
			field string
			value json.RawMessage
		}{fmt.Sprintf("additional_special_tokens[%d]", i), v})
	}
	for _, r := range roles {
		name, err := tokenName(r.value)
		if err != nil {
			return fmt.Errorf("%s: %w: fetch the file again", r.field, err)
		}
		if _, ok := t.special[name]; name != "" && !ok {
			return fmt.Errorf("%s is %.60q, which added_tokens_decoder does not list: the file contradicts itself, fetch it again", r.field, name)
		}
	}

	// Longest first makes the leftmost-first search take the longest name.
	names := slices.Clone(t.tokens[first:])
	slices.SortFunc(names, func(a, b string) int { return len(b) - len(a) })
	for i, n := range names {
		names[i] = regexp.QuoteMeta(n)
	}
	var err error
	t.names, err = regexp.Compile(strings.Join(names, "|"))
	if err != nil {
		return fmt.Errorf("control names: %w: fetch the file again", err)
	}
	return nil
}

// tokenName reads a token name as configurations give it: a string, an object
// with a content, or nothing.
func tokenName(v json.RawMessage) (string, error) {
	if len(v) == 0 || string(v) == "null" {
		return "", nil
	}
	var name string
	if json.Unmarshal(v, &name) == nil {
		return name, nil
	}
	var o struct {
		Content *string `json:"content"`
	}
	if err := json.Unmarshal(v, &o); err != nil || o.Content == nil {
		return "", fmt.Errorf("want a token name or an object with a content, found %.60q", v)
	}
	return *o.Content, nil
}

// addedTokens keeps every entry of the object: decoding into a map would let a
// second entry for one id silently win over the first.
type addedTokens []struct {
	id      int
	content string
}

func (a *addedTokens) UnmarshalJSON(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return fmt.Errorf("added_tokens_decoder is not an object")
	}
	*a = addedTokens{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		id, err := strconv.Atoi(key.(string))
		if err != nil || strconv.Itoa(id) != key {
			return fmt.Errorf("added_tokens_decoder: key %.60q is no token id", key)
		}
		var entry struct {
			Content *string `json:"content"`
		}
		if err := d.Decode(&entry); err != nil {
			return fmt.Errorf("added_tokens_decoder: id %d: %w", id, err)
		}
		switch {
		case entry.Content == nil || *entry.Content == "":
			return fmt.Errorf("added_tokens_decoder: id %d has no content", id)
		// A name is looked for in text as characters; U+FFFD stands for bytes that
		// are none, in a damaged file as in a damaged text.
		case strings.ContainsRune(*entry.Content, '\uFFFD'):
			return fmt.Errorf("added_tokens_decoder: id %d: content %.60q is damaged text", id, *entry.Content)
		case len(*a) == specials:
			return fmt.Errorf("added_tokens_decoder has more than %d entries", specials)
		}
		*a = append(*a, struct {
			id      int
			content string
		}{id, *entry.Content})
	}
	if _, err := d.Token(); err != nil && err != io.EOF {
		return err
	}
	return nil
}
