package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// failureStatus is boxwood's own exit status; what ran in a sandbox can have any other.
const failureStatus = 125

// exitStatus ends the program with a status and no message.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// report prints a failure as one line and a hint.
func (a *app) report(err error) {
	message, hint := explain(err, a.target())
	fmt.Fprintf(a.err, "boxwood: %s\n", printable.Line(message))
	if hint != "" {
		fmt.Fprintf(a.err, "  hint: %s\n", printable.Line(hint))
	}
}

// explain finds the words for a failure, of this program or of the service.
func explain(err error, address string) (message, hint string) {
	var mine *fault.Error
	if errors.As(err, &mine) {
		mine = fault.As(err)
		return mine.Message, mine.Hint
	}
	if errors.Is(err, context.Canceled) {
		return "interrupted", ""
	}
	s, ok := status.FromError(err)
	if !ok {
		return err.Error(), ""
	}
	for _, d := range s.Details() {
		if detail, ok := d.(*pb.Error); ok {
			return withID(s.Message(), detail), detail.Hint
		}
	}
	// No detail: it wasn't the daemon that answered.
	switch s.Code() {
	case codes.Unavailable:
		hint = "start one with `boxwood serve`, or name another with --address or $BOXWOOD_ADDRESS"
		if strings.Contains(s.Message(), "permission denied") {
			hint = "run as root, or as a member of the group that `boxwood serve --socket-group` names"
		}
		return "no daemon answers on " + strings.TrimPrefix(address, "unix:"), hint
	case codes.Canceled:
		return "interrupted", ""
	case codes.DeadlineExceeded:
		return "the daemon did not answer in time", "see its log; it may be busy or stuck"
	case codes.Unimplemented:
		return "the daemon doesn't know this call", "it is of another version: `boxwood version` shows both"
	}
	return s.Message(), ""
}

// withID adds the request id to failures that somebody will look up in the log.
func withID(message string, detail *pb.Error) string {
	if detail.Origin == pb.Error_ORIGIN_INFRASTRUCTURE && detail.RequestId != "" {
		return fmt.Sprintf("%s (request %s)", message, detail.RequestId)
	}
	return message
}
