# `make help` explains the targets. Each is a thin call of a script or of go, so
# that everything can be run without make, too.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev build test test-go test-python test-python-matrix test-python-long test-adapters demo bench lint generate verify-generated \
	check-imports check-docs check-acceptance sabotage clean corpus load vm-test crash payloads rehearse soak race fuzz vulnerabilities

ENV := . scripts/env.sh;

help: ## explain the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## bring a fresh Debian 12 or 13 to a working state; does only what is missing
	@scripts/setup.sh

setup-dev: ## setup, and the tools for regenerating code and linting
	@scripts/setup.sh --dev

build: ## build bin/boxwood
	@scripts/build.sh

test: setup test-go test-python ## set up, then run all tests (as root; what the host can't do is skipped with a reason)

test-go: ## run the Go tests; PKG=./tree/... RUN=TestName narrow it
	@scripts/test-go.sh

test-python: build ## run the tests of the Python package; ARGS="-k name" narrows it
	@scripts/test-python.sh $(ARGS)

test-python-matrix: ## the Python package with every supported interpreter here, and its oldest dependencies (nightly)
	@scripts/test-python-matrix.sh $(ARGS)

test-python-long: build ## what takes long of the Python tests: 5 GiB transfers, 200 exits of each kind (nightly)
	@LONG=1 TIMEOUT=7200 scripts/test-python.sh -k "large_upload or process_ends" $(ARGS)

test-adapters: build ## the adapters against the real projects, each in an environment of its own (nightly; NAME=light: the small ones)
	@scripts/test-adapters.sh $(NAME)

demo: setup ## set up, then run the main job on real parts: replay, fork, search (SHORT=1: smaller)
	@$(ENV) examples/demo/run.sh

bench: build ## run one benchmark, JSON lines: make -s bench NAME=fork (LONG=1: thorough)
	@$(ENV) test -n "$(NAME)" || { echo "usage: make bench NAME=fork" >&2; exit 2; }; benchmarks/run.sh "$(NAME)"

corpus: ## random programs against an oracle, N turns, and N/4 beside random survivors: make corpus N=2000 (SEED=... repeats a run; ROW=200: until each row changed something so often; OUT=file FOR=15m: in pieces, added up there)
	@$(ENV) go test ./engine/corpus -run '^TestCorpus$$' -v -timeout 48h -parallel $$((3 * $$(nproc))) -args -corpus.n $(or $(N),2000) -corpus.seed $(or $(SEED),0) -corpus.row $(or $(ROW),0) -corpus.for $(or $(FOR),0) -corpus.out '$(OUT)'
	@$(ENV) go test ./inspector -run '^TestRandomSurvivors$$' -v -timeout 12h -args -sleepers.n $$(($(or $(N),2000) / 4)) -sleepers.seed $(or $(SEED),0)

load: ## a minute of all the events that sandboxes can make (nightly)
	@$(ENV) go test ./inspector -run '^TestLoad$$' -v -timeout 20m -args -load.for 1m

vm-test: ## the inspector's root tests on Debian 12's own kernel, in an emulated machine (nightly)
	@scripts/vm-test.sh

crash: ## break every step by error, panic and kill -9, then kill a daemon under load, FOR=10m, of CLIENTS=4 at once (nightly; SEED=... repeats a run)
	@$(ENV) BOXWOOD_REQUIRE=all go test -count=1 ./engine/service -run '^(TestCrashMatrix|TestKilledUnderLoad)$$' -v -timeout 12h -args -crash.full -crash.for $(or $(FOR),10m) -crash.clients $(or $(CLIENTS),4) -crash.seed $(or $(SEED),0)

payloads: ## every program that verifies itself, captured, forked, rolled back, with daemon and CRIU killed; then random paths with processes (nightly; SEED=... repeats the paths)
	@$(ENV) BOXWOOD_REQUIRE=all go test -count=1 ./engine/service -run '^(TestPayloads|TestShellPayloads|TestKilledCRIU|TestDaemonKilledInTheWindow|TestPathsAreWhatTheyAreAlone)$$' -v -timeout 12h -args -payloads.full -meta.n $(or $(N),2000) -meta.seed $(or $(SEED),0)

rehearse: ## the store's and the service's tests with each change's function run twice (nightly)
	@$(ENV) BOXWOOD_REQUIRE=all go test -count=1 -tags rehearse ./tree ./engine/service -timeout 1h

soak: ## a month of the store, TURNS=100000 turns a day, and one of a daemon with sandboxes, held to memory, disk and deletions (nightly; SEED=... repeats a run)
	@$(ENV) go test -count=1 ./tree -run '^TestSoak$$' -v -timeout 12h -args -soak.turns $(or $(TURNS),100000) -soak.seed $(or $(SEED),0)
	@$(ENV) BOXWOOD_REQUIRE=all go test -count=1 ./engine/service -run '^TestSoak$$' -v -timeout 12h -args -soak.days 30 -soak.trees 8 -soak.turns 60 -soak.seed $(or $(SEED),0)

race: ## an hour of random operations and kills of the daemon under the race detector, then the checks for leaks; FOR=1h (nightly; SEED=... repeats a run)
	@$(ENV) CGO_ENABLED=1 BOXWOOD_REQUIRE=all go test -race -count=1 ./engine/service -run '^(TestKilledUnderLoad|TestPathsAreWhatTheyAreAlone)$$' -v -timeout 24h -args -crash.for $(or $(FOR),1h) -crash.seed $(or $(SEED),0) -meta.n $(or $(N),400) -meta.seed $(or $(SEED),0)

fuzz: ## every fuzz target for FOR=1m, those that have NAME in their names (nightly; CI runs them for 10 s each, but FuzzRequests, which takes minutes to build)
	@FOR=$(FOR) NAME=$(NAME) scripts/fuzz.sh

vulnerabilities: ## known holes in what is built and installed; says so where the databases can't be asked (nightly)
	@scripts/vulnerabilities.sh

lint: ## format, vet, staticcheck, shellcheck, ruff, mypy, words that have no place here
	@scripts/lint.sh

generate: ## regenerate all committed generated code
	@scripts/generate.sh

verify-generated: ## regenerate it in a copy and demand that nothing changes
	@scripts/verify-generated.sh

check-imports: ## hold the rule who may import whom
	@$(ENV) go test -count=1 ./internal/archtest/

check-docs: ## run the commands that the documentation shows
	@scripts/check-docs.sh

check-acceptance: ## hold docs/ACCEPTANCE.md against the last run of the tests
	@$(ENV) go run ./internal/acceptance/check

sabotage: ## break each guarantee on purpose; its check must turn red (NAME=fsync: one of them)
	@scripts/sabotage.sh $(NAME)

clean: ## remove what was built (.venv, Go and CRIU stay: rm -rf .venv .cache for those)
	rm -rf bin dist .cache/test .cache/generated
