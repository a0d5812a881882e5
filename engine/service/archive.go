package service

import (
	"google.golang.org/grpc"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

func (s *Service) ExportTree(req *boxwoodv1.ExportTreeRequest, out grpc.ServerStreamingServer[boxwoodv1.ExportTreeChunk]) error {
	if (req.GetTreeId() == "") == (req.GetNodeId() == "") {
		return fault.New(fault.Invalid, "bad_export", "an export names a tree or a node, and one of them")
	}
	w := chunks(func(p []byte) error { return out.Send(&boxwoodv1.ExportTreeChunk{Data: p}) })
	err := s.e.ExportTree(out.Context(), engine.Export{Tree: ids.Tree(req.GetTreeId()), Node: ids.Node(req.GetNodeId()),
		WithoutProcesses: req.GetWithoutProcesses(), WithSecrets: req.GetWithSecrets(), Version: s.version}, w)
	if err != nil {
		return err
	}
	return w.flush()
}

func (s *Service) ImportTree(in grpc.ClientStreamingServer[boxwoodv1.ImportTreeRequest, boxwoodv1.ImportTreeResponse]) error {
	first, err := in.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if start == nil {
		return fault.New(fault.Invalid, "bad_import", "the first message of an import must be its start")
	}
	if start.GetDumps() < 0 || int(start.GetDumps()) >= len(boxwoodv1.ImportTreeStart_Dumps_name) {
		return fault.New(fault.Invalid, "bad_import", "there is no way %d to take dumps", start.GetDumps())
	}
	how := engine.Import{NewIDs: start.GetNewIds(), Dumps: engine.DumpsFrom(start.GetDumps())}
	if how.Calls, err = seccomp.Parse(start.GetAllowCalls()); err != nil {
		return err
	}
	who := callerOf(in.Context())
	if who != nil {
		how.Owner, how.Admits = who.Name, func(image *tree.Image) error { return who.mayUse(string(image.Digest)) }
		if who.MaxSavedBytes > 0 {
			how.Most = max(who.MaxSavedBytes-s.access.saved.of(s.e, who.Name), 1)
		}
	}
	if how.Dumps == engine.DumpsTrusted && !(who != nil && who.TrustDumps) && !(who == nil && clientOf(in.Context()).uid == 0) && !sabotage.On("trust") {
		return fault.New(fault.Denied, "dumps_denied", "only root may say that dumps of processes in an archive are to be trusted: who wrote them can do with this host what they like").
			WithHint("leave the dumps out: their nodes are withheld then, all others come. An administrator may let an account trust them: trust_dumps in boxwood serve --clients")
	}
	got, replayed, err := once(in.Context(), s, start.GetIdempotencyKey(), start, &boxwoodv1.ImportTreeResponse{}, func(rec record) (*boxwoodv1.ImportTreeResponse, error) {
		m := &boxwoodv1.ImportTreeResponse{}
		content := &chunkReader{next: func() ([]byte, error) {
			m, err := in.Recv()
			if err == nil && m.GetStart() != nil {
				err = fault.New(fault.Invalid, "bad_import", "an import has one start")
			}
			return m.GetChunk(), err
		}}
		_, err := s.e.ImportTree(in.Context(), content, how, func(tx *tree.Tx, i engine.Imported) error {
			m.Tree = treeMessage(nil, i.Tree)
			m.Tree.NodeCount, m.Tree.CheckpointCount = int64(i.Nodes), int64(i.Checkpoints)
			m.Nodes, m.Checkpoints, m.Bytes, m.Withheld = int64(i.Nodes), int64(i.Checkpoints), i.Bytes, int64(i.Withheld)
			return rec(tx, m)
		})
		return m, err
	})
	if err != nil {
		return err
	}
	if replayed {
		drain(in)
	}
	return in.SendAndClose(got)
}
