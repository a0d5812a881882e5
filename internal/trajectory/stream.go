package trajectory

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"
)

// maxValue is the size of the largest JSON value that is held at once: a step,
// a message, an event. A file may be far larger.
const maxValue = 64 << 20

var (
	errTooLarge = fmt.Errorf("a value is larger than %d MiB", maxValue>>20)
	errEncoding = errors.New("a byte that is not UTF-8")
)

// source reads a file for a decoder. It refuses what isn't UTF-8, which
// the decoder would replace, and reads no further than limit.
type source struct {
	r io.Reader
	// read of the file so far; limit it must not pass.
	read, limit int64
	// rest of a character that the last read cut.
	rest []byte
	// err ended it; a decoder may ask again.
	err error
}

func (s *source) Read(p []byte) (n int, err error) {
	if s.err == nil {
		n, err = s.next(p)
		s.err = err
	}
	return n, s.err
}

func (s *source) next(p []byte) (int, error) {
	room := s.limit - s.read
	if room <= 0 {
		return 0, errTooLarge
	}
	n, err := s.r.Read(p[:min(int64(len(p)), room)])
	s.read += int64(n)
	if len(s.rest) == 0 && n > 0 && utf8.Valid(p[:n]) {
		return n, err
	}
	text := append(s.rest, p[:n]...)
	for len(text) > 0 {
		if text[0] < utf8.RuneSelf {
			text = text[1:]
			continue
		}
		r, size := utf8.DecodeRune(text)
		if r == utf8.RuneError && size == 1 {
			if !utf8.FullRune(text) && err == nil {
				break
			}
			return 0, errEncoding
		}
		text = text[size:]
	}
	s.rest = bytes.Clone(text)
	return n, err
}

// stream walks JSON without holding more than one value of a reader's choice.
type stream struct {
	file io.ReadSeeker
	base int64 // where in the file it began
	src  *source
	dec  *json.Decoder
}

func newStream(file io.ReadSeeker, at int64) (*stream, error) {
	if _, err := file.Seek(at, io.SeekStart); err != nil {
		return nil, err
	}
	src := &source{r: file, limit: maxValue}
	return &stream{file, at, src, json.NewDecoder(src)}, nil
}

// next makes room for one more value.
func (s *stream) next() { s.src.limit = s.dec.InputOffset() + maxValue }

func (s *stream) token() (json.Token, error) {
	s.next()
	t, err := s.dec.Token()
	return t, s.located(s.dec.InputOffset(), err, nil)
}

// decode reads the next value. Its error names the line and the field.
func (s *stream) decode(into any) error {
	s.next()
	at := s.dec.InputOffset()
	return s.located(at, s.dec.Decode(into), into)
}

// more says whether the value that is being walked, or the file, has more.
func (s *stream) more() bool { s.next(); return s.dec.More() }

// end says whether a file of several values is at its end.
func (s *stream) end() (bool, error) {
	if s.more() {
		return false, nil
	}
	_, err := s.dec.Token()
	if err == io.EOF {
		return true, nil
	}
	return false, s.located(s.dec.InputOffset(), err, nil)
}

// skip passes the next value, however large it is in all.
func (s *stream) skip() error {
	for depth := 0; ; {
		t, err := s.token()
		if err != nil {
			return err
		}
		switch t {
		case json.Delim('{'), json.Delim('['):
			depth++
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
		if depth == 0 {
			return nil
		}
	}
}

// object walks an object's members; each must read or skip its value.
func (s *stream) object(member func(name string) error) error {
	return s.inside('{', func(int) error {
		name, err := s.token()
		if err != nil {
			return err
		}
		return member(name.(string)) // the decoder takes only strings here
	})
}

// array walks an array's elements, which are counted from 1; null has none.
func (s *stream) array(element func(i int) error) error { return s.inside('[', element) }

func (s *stream) inside(open json.Delim, each func(i int) error) error {
	t, err := s.token()
	if err != nil || t == nil {
		return err
	}
	if t != open {
		kind := map[json.Delim]string{'{': "an object", '[': "a list"}[open]
		return fmt.Errorf("line %d: it must be %s", s.line(s.dec.InputOffset()), kind)
	}
	for i := 1; s.more(); i++ {
		if err := each(i); err != nil {
			return err
		}
	}
	_, err = s.token()
	return err
}

// elements walks the elements of a file that is one array, or its values if
// it is several (JSON lines).
func (s *stream) elements(list bool, element func(i int) error) error {
	if list {
		return s.array(element)
	}
	for i := 1; ; i++ {
		if end, err := s.end(); end || err != nil {
			return err
		}
		if err := element(i); err != nil {
			return err
		}
	}
}

// line of an offset of the decoder. It reads the file again.
func (s *stream) line(offset int64) int {
	line := 1
	if _, err := s.file.Seek(0, io.SeekStart); err != nil {
		return line
	}
	in := io.LimitReader(s.file, s.base+offset)
	for buf := make([]byte, 64<<10); ; {
		n, err := in.Read(buf)
		line += bytes.Count(buf[:n], []byte("\n"))
		if err != nil {
			return line
		}
	}
}

// located adds the line to an error of the decoder. at is where the value
// begins; the offset in the decoder's error counts differently for tokens and
// values, so the value is looked at again by itself.
func (s *stream) located(at int64, err error, into any) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("line %d: the file ends in the middle of a value", s.line(s.src.read))
	case errors.Is(err, errEncoding):
		return fmt.Errorf("line %d or the one after: %w", s.line(s.src.read-int64(len(s.src.rest))), err)
	case errors.Is(err, errTooLarge):
		return fmt.Errorf("line %d: %w", s.line(at), err)
	}
	var wrong *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &wrong):
		what := "it"
		if wrong.Field != "" {
			what = "field " + wrong.Field
		}
		return fmt.Errorf("line %d: %s must not be a %s", s.line(at+s.blank(at)+wrong.Offset), what, wrong.Value)
	case errors.As(err, &syntax) && into != nil:
		blank := s.blank(at)
		if _, seek := s.file.Seek(s.base+at+blank, io.SeekStart); seek == nil {
			again := json.NewDecoder(io.LimitReader(s.file, maxValue)).Decode(&json.RawMessage{})
			if errors.As(again, &syntax) {
				return fmt.Errorf("line %d: %w", s.line(at+blank+syntax.Offset-1), err)
			}
		}
	}
	return fmt.Errorf("line %d: %w", s.line(at), err)
}

// blank counts what stands between a value and the one before it.
func (s *stream) blank(at int64) int64 {
	buf := make([]byte, 4096)
	if _, err := s.file.Seek(s.base+at, io.SeekStart); err != nil {
		return 0
	}
	n, _ := io.ReadFull(s.file, buf)
	return int64(n - len(bytes.TrimLeft(buf[:n], " \t\r\n,:")))
}
