package criu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protowire"
)

// Rseq says where the kernel writes into the memory of saved processes whenever they run: the areas
// of rseq(2) of their threads, by their pid inside.
func Rseq(images string) (map[int][]uint64, error) {
	at := map[int][]uint64{}
	err := entries(filepath.Join(images, "pstree.img"), func(process []byte) error {
		var pid uint64
		var threads []uint64
		err := fields(process, func(num protowire.Number, v uint64, _ []byte) error {
			switch num {
			case 1: // pid
				pid = v
			case 5: // threads
				threads = append(threads, v)
			}
			return nil
		})
		if err != nil {
			return err
		}
		for _, tid := range threads {
			pointer, err := rseqOf(filepath.Join(images, fmt.Sprintf("core-%d.img", tid)))
			if err != nil {
				return err
			}
			if pointer != 0 {
				at[int(pid)] = append(at[int(pid)], pointer)
			}
		}
		return nil
	})
	return at, err
}

// rseqOf reads the image of one thread; 0: it has no such area.
func rseqOf(path string) (pointer uint64, err error) {
	within := func(b []byte, want protowire.Number, do func([]byte) error) error {
		return fields(b, func(num protowire.Number, _ uint64, inner []byte) error {
			if num != want {
				return nil
			}
			return do(inner)
		})
	}
	err = entries(path, func(core []byte) error {
		return within(core, 5, func(thread []byte) error { // thread_core
			return within(thread, 15, func(rseq []byte) error { // rseq_entry
				return fields(rseq, func(num protowire.Number, v uint64, _ []byte) error {
					if num == 1 { // rseq_abi_pointer
						pointer = v
					}
					return nil
				})
			})
		})
	})
	return pointer, err
}

// entries calls do with each entry of an image.
func entries(path string, do func([]byte) error) error {
	const head = 8
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	bad := fmt.Errorf("%s isn't an image of CRIU", filepath.Base(path))
	if len(b) < head {
		return bad
	}
	for b = b[head:]; len(b) > 0; {
		if len(b) < 4 {
			return bad
		}
		size := uint64(binary.LittleEndian.Uint32(b))
		if b = b[4:]; size > uint64(len(b)) {
			return bad
		}
		if err := do(b[:size]); err != nil {
			return fmt.Errorf("reading %s: %w", filepath.Base(path), err)
		}
		b = b[size:]
	}
	return nil
}

var errMessage = errors.New("malformed message")

// fields calls do with each field of a message that is a number or has bytes.
func fields(b []byte, do func(num protowire.Number, v uint64, bytes []byte) error) error {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return errMessage
		}
		b = b[n:]
		var v uint64
		var inner []byte
		switch typ {
		case protowire.VarintType:
			v, n = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			inner, n = protowire.ConsumeBytes(b)
		default:
			n = protowire.ConsumeFieldValue(num, typ, b)
		}
		if n < 0 {
			return errMessage
		}
		b = b[n:]
		if typ != protowire.VarintType && typ != protowire.BytesType {
			continue
		}
		if err := do(num, v, inner); err != nil {
			return err
		}
	}
	return nil
}
