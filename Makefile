# make demo   the tour: faults injected into a small training run (ARGS="--help" for its options)
# make test   lint, types, and every kind of test there is, in about five minutes on two idle cores
# Both work from a fresh clone: they make .venv and install what they need. make test-all runs the tests that are left.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two targets must not install into .venv at once.
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(if $(CI),--quiet) -c constraints.txt
ARGS ?=

# One stamp per set of extras; the second set holds the first.
DEMO_STAMP := $(VENV)/.installed-demo
DEV_STAMP := $(VENV)/.installed-dev
DEMO_EXTRAS := cli,plot
DEV_EXTRAS := dev,docs,mooncake,ucxx,embedded,otel,prometheus

# Tensors in tests are tiny: a thread pool per process would only fight over the cores.
export OMP_NUM_THREADS ?= 1

# Without it each of the many processes that tests start compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help docs demo test test-all lint types pytest format pictures bench chaos stress loops memory attack simulate sweep fuzz mutants coverage nemo test-wheel clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile
	@echo "Also: make test-all | lint | types | pytest | format | docs | pictures | bench | chaos | stress | loops | memory | attack | simulate | sweep | fuzz | mutants | coverage | nemo | test-wheel | clean"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "asyncdp needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[$(DEMO_EXTRAS)]'
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[$(DEV_EXTRAS)]'
	@touch $@ $(DEMO_STAMP)

# $(call timed,name,command): runs it and says how long it took, by the shell's own SECONDS, not by that of make. With
# && after braces: of `a && b; echo` the shell forgets that a failed.
unexport SECONDS
timed = @{ $(2); } && echo "-- $(1): $$SECONDS s"

demo: $(DEMO_STAMP)
	@$(BIN)/python -m asyncdp.cli.main demo $(ARGS)

# Three processes: one for all that is on Ray, which mostly waits for it, and one for each of two cores. SEED=7 repeats
# the order of a run, which says its seed.
WORKERS ?= 3
TOGETHER = $(BIN)/python -m pytest -n $(WORKERS) --durations 10 $(if $(SEED),--order-seed $(SEED))

# The type checkers run beside the tests, which they delay less than they would take alone; what they say comes last.
test: lint
	@said=$$(mktemp); $(MAKE) --no-print-directory types >$$said 2>&1 & types=$$!; \
	trap 'kill $$types 2>/dev/null || :; rm -f $$said' EXIT; \
	red=0; $(TOGETHER) -m "not slow" $(ARGS) || red=1; echo "-- tests: $$SECONDS s"; \
	wait $$types || red=1; cat $$said; exit $$red

# What make test leaves out: long versions of what it shows in short, and what takes many processes or much time.
test-all: $(DEV_STAMP)
	$(call timed,slow tests,$(TOGETHER) -m slow $(ARGS))

lint: $(DEV_STAMP)
	$(call timed,lint,$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-logo --no-cache)

# By package name: each file behind a symlink is then seen once, under the name it is imported by.
TYPED := -p asyncdp $(if $(wildcard tests/typing/*.py),-p tests.typing)
# A user's code, the programs of the pages among it, is read by both type checkers; pyright's is basedpyright, which comes from PyPI with its node.
types: $(DEV_STAMP)
	$(BIN)/python -m tests.docs.blocks tests/typing/pages
	$(call timed,types,$(BIN)/mypy $(TYPED) && $(BIN)/python -m basedpyright --pythonpath $(BIN)/python)

pytest: $(DEV_STAMP)
	$(call timed,tests,$(BIN)/python -m pytest $(ARGS))

format: $(DEV_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Real faults on real backends, in full (ARGS: a backend's name); a slice of it is part of the tests.
chaos: $(DEV_STAMP)
	$(call timed,chaos,$(BIN)/python -m tests.chaos $(ARGS))

# Random stacks under random faults, in virtual time, on all cores, for so many seconds.
simulate: $(DEV_STAMP)
	$(call timed,simulation,$(BIN)/python -m asyncdp.testing.simulate --seconds $(or $(SECONDS),60) $(ARGS))

# Writers and readers of UCXX in processes of their own, random cancels, a small arena: over shared memory, then UCX.
stress: $(DEV_STAMP)
	$(call timed,stress,$(BIN)/python -m tests.chaos.ucxx_stress $(ARGS))

# One client over 10,000 event loops, on each transport: descriptors, threads and memory stay (ARGS="ucxx --times 500").
loops: $(DEV_STAMP)
	$(call timed,loops,$(BIN)/python -m tests.chaos.loops $(ARGS))

# A client and a slot host over 10,000 puts, gets and claims with cancels: memory and descriptors stay (ARGS="lane --calls 2000").
memory: $(DEV_STAMP)
	$(call timed,memory,$(BIN)/python -m tests.chaos.memory $(ARGS))

# Attacks slot hosts as stranger, client, neighbour and other plane, beside an honest client: SECURITY.md's promises, with
# figures (ARGS="pipelining silent --seconds 10", ARGS="--against ../before" for those of another checkout).
attack: $(DEV_STAMP)
	$(call timed,attacks,$(BIN)/python -m tests.attack $(ARGS))

# Cancels every verb at every checkpoint, on every transport; a slice of it is part of the tests.
sweep: $(DEV_STAMP)
	$(call timed,sweep,ASYNCDP_SWEEP_ALL=1 $(BIN)/python -m pytest tests/sweep --timeout 600 $(ARGS))

# The documentation site, into site/: warnings are errors. ARGS=serve shows it on loopback while it is written.
docs: $(DEV_STAMP)
	$(call timed,docs,NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --strict))

# Takes the pictures of docs/operations.md anew: of asyncdp top, beside a demo of processes of which some are killed.
pictures: $(DEV_STAMP)
	$(call timed,pictures,$(BIN)/python -m tests.docs.pictures $(ARGS))

# Lists the benchmarks; ARGS="borrow layers" runs these, ARGS="all --json now.json" each of them.
bench: $(DEV_STAMP)
	$(call timed,benchmarks,$(BIN)/python -m benchmarks $(ARGS))

# Any verbs against a plain dict, any bytes on the wire; SECONDS=300: for so long, with new seeds.
fuzz: $(DEV_STAMP)
	$(call timed,fuzzing,$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(ARGS))

# Each small fault of the sans-IO files has to fail a test (ARGS="middleware/policy/permit.py": of one file).
mutants: $(DEV_STAMP)
	$(call timed,mutants,$(BIN)/python -m tests.mutation $(ARGS))

# Wheel and sdist are built and checked, each extra is tried in a venv of its own, tests run against the installed wheel.
# PYTHONS="one/bin/python other/bin/python": with each of these, in whose environments the dependencies are installed.
test-wheel: $(DEV_STAMP)
	$(call timed,wheel,$(BIN)/python -m tests.wheel $(addprefix --python ,$(PYTHONS)) $(ARGS))

coverage: $(DEV_STAMP)
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage report

# NeMo-RL's own tests of its data plane, from a checkout beside this one, through the drop-in: a table by file.
nemo: $(DEV_STAMP)
	$(call timed,NeMo-RL,$(BIN)/python -m tests.nemo_rl $(NEMO) $(ARGS))

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
