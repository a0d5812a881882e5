package service

import (
	"unicode/utf8"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// maxListed are the entries that one list of a request may have. What a call does with a list it does at once: in one change of
// the store, which others wait for (10,000 annotations: 0.1 s where nothing else runs), or in one answer, which has to fit a message.
// The words of a command have a bound of their own, and so have the nodes that a backup changes.
const maxListed = 10000

// fits refuses a request with more.
func fits(req any) error {
	m, ok := req.(interface{ ProtoReflect() protoreflect.Message })
	if !ok || sabotage.On("lists") {
		return nil
	}
	return listsOf(m.ProtoReflect())
}

func listsOf(m protoreflect.Message) (err error) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap() || f.Message() == nil && !f.IsList():
		case !f.IsList():
			err = listsOf(v.Message())
		case f.Kind() == protoreflect.BytesKind:
		case v.List().Len() > maxListed:
			err = fault.New(fault.Invalid, "too_many", "%s has %d entries; a call takes %d", f.Name(), v.List().Len(), maxListed).WithHint("make several calls of it")
		case f.Message() != nil:
			for i := 0; i < v.List().Len() && err == nil; i++ {
				err = listsOf(v.List().Get(i).Message())
			}
		}
		return err == nil
	})
	return err
}

// maxMessage bounds what a failure says, to a client (whose grpc may give up beyond 8 KiB of headers, and tell of that instead) and in the
// log: it may tell of each entry of a list.
const maxMessage = 1280

func short(text string) string {
	if len(text) <= maxMessage {
		return text
	}
	n := maxMessage
	for !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n] + " ..."
}
