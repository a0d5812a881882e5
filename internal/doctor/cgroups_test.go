package doctor

import (
	"reflect"
	"testing"
)

// Hosts differ in where cgroups lie; a wrong guess leaves sandboxes without limits.
func TestParseHierarchies(t *testing.T) {
	tests := []struct {
		name, mountinfo string
		want            hierarchies
	}{
		{"pure v2", "25 20 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
			hierarchies{"/sys/fs/cgroup", map[string]string{}}},
		{"hybrid", "1 0 0:1 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n" +
			"2 0 0:2 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
			hierarchies{"/sys/fs/cgroup/unified", map[string]string{
				"rw": "/sys/fs/cgroup/cpu", "cpu": "/sys/fs/cgroup/cpu", "cpuacct": "/sys/fs/cgroup/cpu"}}},
		{"first mount counts", "1 0 0:1 / /a rw - cgroup2 x rw\n2 0 0:1 / /b rw - cgroup2 x rw\n",
			hierarchies{"/a", map[string]string{}}},
		{"garbage", "\n - \nx - cgroup2\n", hierarchies{"", map[string]string{}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := parseHierarchies(tt.mountinfo); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}
