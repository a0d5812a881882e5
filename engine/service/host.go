package service

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/hostload"
	"github.com/boxwood-rl/boxwood/internal/ids"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/sched"
)

func (s *Service) GetInfo(context.Context, *boxwoodv1.GetInfoRequest) (*boxwoodv1.GetInfoResponse, error) {
	i, err := s.e.Info()
	if err != nil {
		return nil, err
	}
	m := &boxwoodv1.GetInfoResponse{
		Version: s.version, Kernel: engine.KernelRelease(),
		PoolBytesTotal: i.Pool.Total, PoolBytesUsed: i.Pool.Used, Sandboxes: int64(i.Sandboxes), Nodes: int64(i.Nodes),
		ZygotesReady: int64(i.Zygotes), DefaultLimits: limitsMessage(i.Limits), LostEvents: int64(i.LostEvents),
		PendingRemovals: int64(i.PendingRemovals),
	}
	for _, l := range s.e.Lines() {
		for k, c := range l.Classes {
			if c.Added+c.Refused > 0 || c.Wasted > 0 {
				m.Queues = append(m.Queues, queueMessage(l, sched.Class(k), c))
			}
		}
	}
	if m.Host, err = loadMessage(); err != nil {
		return nil, err
	}
	for _, c := range i.Capabilities {
		m.Capabilities = append(m.Capabilities, &boxwoodv1.Capability{Name: c.Name, State: boxwoodv1.Capability_State(c.State), Detail: c.Detail})
	}
	return m, nil
}

func queueMessage(l engine.Line, k sched.Class, c sched.Standing) *boxwoodv1.Queue {
	return &boxwoodv1.Queue{
		Line: l.Line.String(), Class: k.String(), Slots: int64(l.Slots), Running: int64(c.Running), Waiting: int64(c.Waiting),
		Tenants: int64(c.Tenants), OldestNs: int64(c.Oldest), Started: int64(c.Started), Done: int64(c.Done), Failed: int64(c.Failed),
		Cancelled: int64(c.Cancelled), Dropped: int64(c.Dropped), Promoted: int64(c.Promoted), Refused: int64(c.Refused), Late: int64(c.Late),
		WaitNs: int64(c.Wait.Sum), TookNs: int64(c.Took.Sum), Exposed: int64(c.Exposed.Count), ExposedNs: int64(c.Exposed.Sum), WastedNs: int64(c.Wasted),
		Limit: int64(c.Limit), LimitRaised: int64(c.Raised), LimitLowered: int64(c.Lowered),
	}
}

func loadMessage() (*boxwoodv1.HostLoad, error) {
	now, err := hostload.Read()
	if err != nil {
		return nil, err
	}
	m := &boxwoodv1.HostLoad{
		At: now.At.UnixNano(), MemoryTotal: now.MemoryTotal, MemoryAvailable: now.MemoryAvailable,
		DaemonCpuNs: int64(now.Processor), DaemonResident: now.Resident,
	}
	if s := now.Stalls; s != nil {
		m.HasStalls = true
		m.CpuSomeNs, m.IoSomeNs, m.IoFullNs = int64(s.CPU), int64(s.IO), int64(s.IOFull)
		m.MemorySomeNs, m.MemoryFullNs = int64(s.Memory), int64(s.MemoryFull)
	}
	return m, nil
}

// progressEvery is how often an import tells how far it is.
const progressEvery = 200 * time.Millisecond

func (s *Service) ImportImage(req *boxwoodv1.ImportImageRequest, out grpc.ServerStreamingServer[boxwoodv1.ImportImageEvent]) error {
	ctx := out.Context()
	path, done, err := s.imports.open(clientOf(ctx), req.GetPath())
	if err != nil {
		return err
	}
	defer done()
	last, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.ImportImageEvent{}, func(record) (*boxwoodv1.ImportImageEvent, error) {
		var told time.Time
		var step string
		r, err := s.e.ImportImage(ctx, path, req.GetName(), func(now string, done, total int64) {
			if now == step && time.Since(told) < progressEvery {
				return
			}
			told, step = time.Now(), now
			// A client that stopped listening ends the call through its context.
			_ = out.Send(&boxwoodv1.ImportImageEvent{Step: now, DoneBytes: done, TotalBytes: total})
		})
		if err != nil {
			return nil, err
		}
		return &boxwoodv1.ImportImageEvent{Step: "done", Image: imageMessage(&r.Image), LeftOut: r.LeftOut, LeftOutCount: r.LeftOutCount}, nil
	})
	if err != nil {
		return err
	}
	return out.Send(last)
}

func (s *Service) ListImages(context.Context, *boxwoodv1.ListImagesRequest) (*boxwoodv1.ListImagesResponse, error) {
	m := &boxwoodv1.ListImagesResponse{}
	for i := range s.e.Store.View().Images() {
		m.Images = append(m.Images, imageMessage(i))
	}
	return m, nil
}

func (s *Service) RemoveImage(ctx context.Context, req *boxwoodv1.RemoveImageRequest) (*boxwoodv1.RemoveImageResponse, error) {
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.RemoveImageResponse{}, func(record) (*boxwoodv1.RemoveImageResponse, error) {
		freed, err := s.e.RemoveImage(ctx, req.GetImage())
		if who := callerOf(ctx); who != nil && !who.AllTrees && err != nil && fault.As(err).Reason == "image_in_use" {
			err = fault.New(fault.Precondition, "image_in_use", "a tree stands on image %s", req.GetImage()) // whose, is the tree's client's
		}
		return &boxwoodv1.RemoveImageResponse{FreedBytes: freed}, err
	})
	return got, err
}

func (s *Service) ExportStats(req *boxwoodv1.ExportStatsRequest, out grpc.ServerStreamingServer[boxwoodv1.ExportStatsChunk]) error {
	w := chunks(func(p []byte) error { return out.Send(&boxwoodv1.ExportStatsChunk{Data: p}) })
	if err := s.e.ExportStats(out.Context(), req.GetTable(), filterOf(req), w); err != nil {
		return err
	}
	return w.flush()
}

// filterOf is which rows an export wants.
func filterOf(req *boxwoodv1.ExportStatsRequest) stats.Filter {
	f := stats.Filter{Tree: ids.Tree(req.GetTreeId()), Verdicts: req.GetVerdicts()}
	if ns := req.GetSince(); ns != 0 {
		f.Since = time.Unix(0, ns)
	}
	if ns := req.GetUntil(); ns != 0 {
		f.Until = time.Unix(0, ns)
	}
	return f
}

func (s *Service) ListTables(context.Context, *boxwoodv1.ListTablesRequest) (*boxwoodv1.ListTablesResponse, error) {
	m := &boxwoodv1.ListTablesResponse{}
	for _, t := range s.e.Stats.Tables() {
		tm := &boxwoodv1.Table{Name: t.Name, Description: t.Description, Rows: t.Rows}
		for _, c := range t.Columns {
			tm.Columns = append(tm.Columns, &boxwoodv1.Column{Name: c.Name, Type: c.Type, Description: c.Description})
		}
		m.Tables = append(m.Tables, tm)
	}
	return m, nil
}
