package stats

import (
	"slices"
	"strings"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// Filter says which rows of a table are wanted: those that it says nothing against. The zero value wants all. A row that has a
// null where the filter asks for something isn't wanted.
type Filter struct {
	Tree ids.Tree
	// Since and Until bound the time of a row, its started_at or at: not before the one, and before the other.
	Since, Until time.Time
	// Verdicts are words of the column verdict.
	Verdicts []string
}

// The columns that a filter looks at, in the tables that have them.
const (
	verdictColumn = "verdict"
	startColumn   = "started_at"
	instantColumn = "at"
)

// wanted says of a batch which of its rows are wanted.
type wanted func(arrow.Record) func(row int) bool

// of is the filter for a table; nil if it wants all rows. fault.Invalid if the table has no such column, or the filter no sense.
func (f Filter) of(name string, schema *arrow.Schema) (wanted, error) {
	var conditions []wanted
	column := func(names ...string) int {
		for _, n := range names {
			if at := schema.FieldIndices(n); len(at) == 1 {
				return at[0]
			}
		}
		return -1
	}
	if f.Tree != "" {
		at := column(TreeColumn)
		if at < 0 {
			return nil, fault.New(fault.Invalid, "no_tree_column", "rows of the table %s are of no tree", name).WithHint("leave the tree out")
		}
		conditions = append(conditions, func(rec arrow.Record) func(int) bool {
			c := rec.Column(at).(*array.String)
			return func(row int) bool { return c.IsValid(row) && c.Value(row) == string(f.Tree) }
		})
	}
	if !f.Since.IsZero() || !f.Until.IsZero() {
		if !f.Since.IsZero() && !f.Until.IsZero() && !f.Since.Before(f.Until) {
			return nil, fault.New(fault.Invalid, "bad_times", "no row is from %s on and before %s", f.Since.UTC().Format(time.RFC3339Nano), f.Until.UTC().Format(time.RFC3339Nano))
		}
		at := column(startColumn, instantColumn) // which every table has, as a test holds
		conditions = append(conditions, func(rec arrow.Record) func(int) bool {
			c := rec.Column(at).(*array.Timestamp)
			since, until := arrow.Timestamp(f.Since.UnixNano()), arrow.Timestamp(f.Until.UnixNano())
			return func(row int) bool {
				return c.IsValid(row) && (f.Since.IsZero() || c.Value(row) >= since) && (f.Until.IsZero() || c.Value(row) < until)
			}
		})
	}
	if len(f.Verdicts) > 0 {
		at := column(verdictColumn)
		if at < 0 {
			return nil, fault.New(fault.Invalid, "no_verdict_column", "rows of the table %s have no verdict", name).WithHint("leave the verdicts out")
		}
		for _, v := range f.Verdicts {
			if !slices.Contains(verdictWords, v) {
				return nil, fault.New(fault.Invalid, "bad_verdict", "%.64q is no verdict", v).WithHint("verdicts are %s", strings.Join(verdictWords, ", "))
			}
		}
		conditions = append(conditions, func(rec arrow.Record) func(int) bool {
			c := rec.Column(at).(*array.Dictionary)
			words := c.Dictionary().(*array.String)
			return func(row int) bool {
				return c.IsValid(row) && slices.Contains(f.Verdicts, words.Value(c.GetValueIndex(row)))
			}
		})
	}
	if conditions == nil {
		return nil, nil
	}
	return func(rec arrow.Record) func(int) bool {
		each := make([]func(int) bool, len(conditions))
		for i, c := range conditions {
			each[i] = c(rec)
		}
		return func(row int) bool {
			return !slices.ContainsFunc(each, func(is func(int) bool) bool { return !is(row) })
		}
	}, nil
}
