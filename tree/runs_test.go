package tree

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// If it fails, a restart of the daemon gives two attempts of a run the same number.
func TestAttemptsGoOnOverRestarts(t *testing.T) {
	fs := vfs.NewCrashableMem()
	var r *Run
	for want := range int64(3) {
		s := mustOpen(t, "state", Options{FS: fs})
		mustUpdate(t, s, func(tx *Tx) (err error) { r, err = tx.OpenRun("grpo"); return err })
		if r.Attempt != want+1 {
			t.Fatalf("attempt %d, want %d", r.Attempt, want+1)
		}
		fs = fs.CrashClone(vfs.CrashCloneCfg{})
		mustCheck(t, s)
	}
	s := mustOpen(t, "state", Options{FS: fs})
	r, err := s.View().Run("grpo")
	if err != nil {
		t.Fatal(err)
	}
	wantFault(t, r.Admits(2), fault.Precondition, "attempt_superseded")
	wantFault(t, r.Admits(4), fault.Invalid, "no_such_attempt")
	wantFault(t, r.Admits(0), fault.Invalid, "no_such_attempt")
	if err := r.Admits(3); err != nil {
		t.Fatal(err)
	}
	mustUpdate(t, s, func(tx *Tx) error { return tx.CloseRun("grpo", 3) })
	if r, err = s.View().Run("grpo"); err != nil {
		t.Fatal(err)
	}
	wantFault(t, r.Admits(3), fault.Precondition, "run_closed")
	for _, bad := range []string{"", "a/b", string(make([]byte, MaxRunName+1))} {
		_, err := s.Update(testContext(t), func(tx *Tx) error { _, err := tx.OpenRun(bad); return err })
		wantFault(t, err, fault.Invalid, "bad_record")
	}
}
