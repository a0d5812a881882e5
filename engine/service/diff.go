package service

import (
	"google.golang.org/grpc"

	"github.com/boxwood-rl/boxwood/engine/merged"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (s *Service) Diff(req *boxwoodv1.DiffRequest, out grpc.ServerStreamingServer[boxwoodv1.FileDifference]) error {
	if len(req.GetNodeIds()) != 2 {
		return fault.New(fault.Invalid, "bad_diff", "a comparison is of two nodes, not of %d", len(req.GetNodeIds()))
	}
	changes, err := s.e.Diff(out.Context(), ids.Node(req.GetNodeIds()[0]), ids.Node(req.GetNodeIds()[1]))
	if err != nil {
		return err
	}
	for _, c := range changes {
		if err := out.Send(&boxwoodv1.FileDifference{Path: []byte(c.Path), Was: fileMessage(c.Was), Is: fileMessage(c.Is)}); err != nil {
			return err
		}
	}
	return nil
}

func fileMessage(f *merged.File) *boxwoodv1.FileState {
	if f == nil {
		return nil
	}
	return &boxwoodv1.FileState{
		Kind: f.Kind, Mode: f.Mode, Uid: f.UID, Gid: f.GID, Mtime: f.Mtime, Size: f.Size, Sha256: f.SHA256, Target: []byte(f.Target), Attributes: f.Attributes,
	}
}
