package acceptance

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"strings"
)

// Outcome of a test with all its subtests or parameters: the worst counts.
type Outcome int

const (
	Passed Outcome = iota
	Skipped
	Failed
)

func (o Outcome) String() string { return [...]string{"passed", "was skipped", "failed"}[o] }

// Event is a line of `go test -json`.
type Event struct {
	Action  string
	Package string
	Test    string
	Output  string
}

// ReadGo reads `go test -json`. Names are "folder Test/sub", the folder below module.
func ReadGo(r io.Reader, module string) (map[string]Outcome, error) {
	results := map[string]Outcome{}
	events := json.NewDecoder(r)
	for {
		var e Event
		err := events.Decode(&e)
		if errors.Is(err, io.EOF) {
			return results, nil
		}
		if err != nil {
			return nil, err
		}
		outcome, ended := map[string]Outcome{"pass": Passed, "skip": Skipped, "fail": Failed}[e.Action]
		if !ended || e.Test == "" {
			continue
		}
		folder := strings.TrimPrefix(strings.TrimPrefix(e.Package, module), "/")
		if folder == "" {
			folder = "."
		}
		// Subtests end before their parents; a skip among them counts for those.
		for name := e.Test; name != ""; name = parent(name) {
			key := folder + " " + name
			results[key] = max(results[key], outcome)
		}
	}
}

func parent(test string) string {
	return test[:max(strings.LastIndexByte(test, '/'), 0)]
}

// ReadJUnit reads what pytest writes with --junitxml. Names are "file.py::test",
// and "file.py::Class::test" for methods; parameters are left out.
func ReadJUnit(r io.Reader) (map[string]Outcome, error) {
	var report struct {
		Cases []struct {
			Class   string    `xml:"classname,attr"`
			Name    string    `xml:"name,attr"`
			Skipped *struct{} `xml:"skipped"`
			Failure *struct{} `xml:"failure"`
			Error   *struct{} `xml:"error"`
		} `xml:"testsuite>testcase"`
	}
	if err := xml.NewDecoder(r).Decode(&report); err != nil {
		return nil, err
	}
	results := map[string]Outcome{}
	for _, c := range report.Cases {
		outcome := Passed
		switch {
		case c.Failure != nil || c.Error != nil:
			outcome = Failed
		case c.Skipped != nil:
			outcome = Skipped
		}
		key := pythonName(c.Class, c.Name)
		results[key] = max(results[key], outcome)
	}
	return results, nil
}

// pythonName turns "python-client.tests.test_fork.TestFork", "test_one[2]" into
// "test_fork.py::TestFork::test_one".
func pythonName(class, name string) string {
	name, _, _ = strings.Cut(name, "[")
	parts := strings.Split(class, ".")
	for i, part := range parts {
		if strings.HasPrefix(part, "test_") {
			return strings.Join(append([]string{part + ".py"}, append(parts[i+1:], name)...), "::")
		}
	}
	return class + "::" + name
}
