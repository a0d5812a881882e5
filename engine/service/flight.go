package service

import (
	"context"
	"slices"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/flight"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// flightService is what the calls of Arrow Flight begin with.
const flightService = "/arrow.flight.protocol.FlightService/"

// flightVerbOf has the calls of Arrow Flight that there are here. An account may make no others.
var flightVerbOf = map[string]string{"ListFlights": "read", "GetFlightInfo": "read", "GetSchema": "read", "DoGet": "read"}

// flights are the tables of statistics for clients that speak Arrow Flight. What they ask for is an ExportStatsRequest, and they
// are held to what its caller would be: a ticket is one as JSON, so is the command of a descriptor; a path is the table, and
// the tree if only that is wanted. The criteria of a list are a tree's id.
type flights struct {
	flight.BaseFlightServer
	s *Service
}

// maxTicket is many times what a ticket of ours has.
const maxTicket = 4 << 10

// flightAsks is what a request of Arrow Flight asks for; nil of other requests. Each request of an account goes through
// it, and is then held to what it gives. A list without criteria asks for nothing that isn't its caller's.
func flightAsks(req any) (any, error) {
	if sabotage.On("tickets") {
		return nil, nil
	}
	switch r := req.(type) {
	case *flight.Ticket:
		return ticketAsks(r.GetTicket())
	case *flight.FlightDescriptor:
		return descriptorAsks(r)
	case *flight.Criteria:
		return &boxwoodv1.ListNodesRequest{TreeId: string(r.GetExpression())}, nil
	}
	return nil, nil
}

func ticketAsks(ticket []byte) (*boxwoodv1.ExportStatsRequest, error) {
	asked := &boxwoodv1.ExportStatsRequest{}
	if len(ticket) > maxTicket {
		return nil, fault.New(fault.Invalid, "bad_ticket", "a ticket of %d bytes is none of this daemon's", len(ticket))
	}
	if err := protojson.Unmarshal(ticket, asked); err != nil {
		return nil, fault.New(fault.Invalid, "bad_ticket", "%.100q is no ticket: %w", ticket, err).
			WithHint(`a ticket, or the command of a descriptor, is like {"table": "turns", "tree_id": "tr_..."}; all but the table may be left out`)
	}
	return asked, nil
}

func descriptorAsks(d *flight.FlightDescriptor) (*boxwoodv1.ExportStatsRequest, error) {
	path := d.GetPath()
	switch {
	case d.GetType() == flight.DescriptorCMD:
		return ticketAsks(d.GetCmd())
	case d.GetType() == flight.DescriptorPATH && len(path) == 1:
		return &boxwoodv1.ExportStatsRequest{Table: path[0]}, nil
	case d.GetType() == flight.DescriptorPATH && len(path) == 2:
		return &boxwoodv1.ExportStatsRequest{Table: path[0], TreeId: path[1]}, nil
	}
	return nil, fault.New(fault.Invalid, "bad_descriptor", "a descriptor is a path of a table and, if only its rows are wanted, a tree; or a command like a ticket")
}

// offer is what a table is announced as.
func (f *flights) offer(d *flight.FlightDescriptor, asked *boxwoodv1.ExportStatsRequest, rows int64) (*flight.FlightInfo, error) {
	schema, err := f.s.e.Stats.Schema(asked.GetTable(), filterOf(asked))
	if err != nil {
		return nil, err
	}
	ticket, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(asked)
	if err != nil {
		return nil, err
	}
	return &flight.FlightInfo{
		Schema: flight.SerializeSchema(schema, memory.DefaultAllocator), FlightDescriptor: d, Ordered: true,
		Endpoint:     []*flight.FlightEndpoint{{Ticket: &flight.Ticket{Ticket: ticket}}},
		TotalRecords: rows, TotalBytes: -1,
	}, nil
}

// rows that are told ahead: nobody knows how many a filter wants.
func (f *flights) rows(asked *boxwoodv1.ExportStatsRequest) int64 {
	if asked.GetTreeId() == "" && asked.GetSince() == 0 && asked.GetUntil() == 0 && len(asked.GetVerdicts()) == 0 {
		for _, t := range f.s.e.Stats.Tables() {
			if t.Name == asked.GetTable() {
				return t.Rows
			}
		}
	}
	return -1
}

func (f *flights) GetFlightInfo(_ context.Context, d *flight.FlightDescriptor) (*flight.FlightInfo, error) {
	asked, err := descriptorAsks(d)
	if err != nil {
		return nil, err
	}
	return f.offer(d, asked, f.rows(asked))
}

func (f *flights) GetSchema(_ context.Context, d *flight.FlightDescriptor) (*flight.SchemaResult, error) {
	asked, err := descriptorAsks(d)
	if err != nil {
		return nil, err
	}
	schema, err := f.s.e.Stats.Schema(asked.GetTable(), filterOf(asked))
	if err != nil {
		return nil, err
	}
	return &flight.SchemaResult{Schema: flight.SerializeSchema(schema, memory.DefaultAllocator)}, nil
}

// ListFlights gives the tables of a tree or, without one, of all trees; to an account that has only its own, of each of those.
func (f *flights) ListFlights(c *flight.Criteria, out flight.FlightService_ListFlightsServer) error {
	v := f.s.e.Store.View()
	var trees []ids.Tree
	switch who := callerOf(out.Context()); {
	case len(c.GetExpression()) > 0:
		t, err := v.Tree(ids.Tree(c.GetExpression()))
		if err != nil {
			return err
		}
		trees = append(trees, t.ID)
	case who == nil || who.AllTrees:
		trees = append(trees, "")
	default:
		for t := range v.Trees() {
			if who.owns(t) {
				trees = append(trees, t.ID)
			}
		}
	}
	tables := f.s.e.Stats.Tables()
	for _, of := range trees {
		for _, t := range tables {
			if of != "" && !slices.ContainsFunc(t.Columns, func(c stats.Column) bool { return c.Name == stats.TreeColumn }) {
				continue
			}
			d := &flight.FlightDescriptor{Type: flight.DescriptorPATH, Path: []string{t.Name}}
			rows := t.Rows
			if of != "" {
				d.Path, rows = append(d.Path, string(of)), -1
			}
			info, err := f.offer(d, &boxwoodv1.ExportStatsRequest{Table: t.Name, TreeId: string(of)}, rows)
			if err != nil {
				return err
			}
			if err := out.Send(info); err != nil {
				return err
			}
		}
	}
	return nil
}

// DoGet holds one batch at a time: the client's reading is what the next one waits for.
func (f *flights) DoGet(t *flight.Ticket, out flight.FlightService_DoGetServer) error {
	asked, err := ticketAsks(t.GetTicket())
	if err != nil {
		return err
	}
	var w *flight.Writer
	err = f.s.e.ReadStats(out.Context(), asked.GetTable(), filterOf(asked), func(schema *arrow.Schema) func(arrow.Record) error {
		w = flight.NewRecordWriter(out, ipc.WithSchema(schema))
		return w.Write
	})
	if err != nil {
		return err
	}
	return w.Close()
}
