package criu

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// An image file is two words of magic, and then entries: a word of size and a
// protobuf message, each word 32 bits, little-endian.

// childImages fills dir with what CRIU is to read for one child: links to the files
// of the dump, but for what a child has of its own, its id range and host name.
func (p *Program) childImages(l Load, dir string) error {
	entries, err := os.ReadDir(l.Images)
	if err != nil {
		return fmt.Errorf("reading a dump: %w", err)
	}
	for _, e := range entries {
		from, to := filepath.Join(l.Images, e.Name()), filepath.Join(dir, e.Name())
		var err error
		switch {
		case strings.HasPrefix(e.Name(), "userns-"):
			err = rewrite(from, to, usernsEntry(l.IDBase))
		case strings.HasPrefix(e.Name(), "utsns-"):
			err = rewrite(from, to, utsnsEntry(l.Hostname))
		default:
			err = os.Link(from, to)
		}
		if err != nil {
			return fmt.Errorf("preparing the images of a child: %w", err)
		}
	}
	return nil
}

// rewrite copies an image of one entry with another entry in its place.
func rewrite(from, to string, entry func(old []byte) ([]byte, error)) error {
	const head = 8
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if len(b) < head+4 || int(binary.LittleEndian.Uint32(b[head:])) != len(b)-head-4 {
		return fmt.Errorf("%s isn't an image of one entry", filepath.Base(from))
	}
	fresh, err := entry(b[head+4:])
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(from), err)
	}
	out := binary.LittleEndian.AppendUint32(append([]byte(nil), b[:head]...), uint32(len(fresh)))
	return os.WriteFile(to, append(out, fresh...), 0o644)
}

// idsEach is how many ids a box has.
const idsEach = 65536

// usernsEntry maps ids from 0 to the child's. All else in a dump names ids as
// they are inside.
func usernsEntry(base uint32) func([]byte) ([]byte, error) {
	return func(old []byte) ([]byte, error) {
		var extent []byte
		for i, v := range []uint64{0, uint64(base), idsEach} { // first, lower_first, count
			extent = protowire.AppendTag(extent, protowire.Number(i+1), protowire.VarintType)
			extent = protowire.AppendVarint(extent, v)
		}
		var out []byte
		for _, field := range []protowire.Number{1, 2} { // uid_map, gid_map
			out = protowire.AppendTag(out, field, protowire.BytesType)
			out = protowire.AppendBytes(out, extent)
		}
		return out, nil
	}
}

// utsnsEntry sets the host name and keeps the domain name.
func utsnsEntry(hostname string) func([]byte) ([]byte, error) {
	return func(old []byte) ([]byte, error) {
		var out []byte
		out = protowire.AppendTag(out, 1, protowire.BytesType)
		out = protowire.AppendString(out, hostname)
		for len(old) > 0 {
			num, typ, n := protowire.ConsumeTag(old)
			if n < 0 {
				return nil, protowire.ParseError(n)
			}
			m := protowire.ConsumeFieldValue(num, typ, old[n:])
			if m < 0 {
				return nil, protowire.ParseError(m)
			}
			if num != 1 {
				out = append(out, old[:n+m]...)
			}
			old = old[n+m:]
		}
		return out, nil
	}
}
