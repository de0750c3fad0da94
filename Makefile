# `make help` lists the targets. `make test TORCH=2.15.0` runs on another torch, in an environment of its own.

PINNED := 2.13.0
TRITON := triton==3.7.1; sys_platform == 'linux'
TORCH ?= $(PINNED)
PYTHON ?= python3

OTHER := $(filter-out $(PINNED),$(TORCH))
VENV := .venv$(if $(OTHER),-$(OTHER))
BIN := $(VENV)/bin
GPU_TESTS := $(addprefix tests/,exchange kernels ops parallel torch_internals test_examples.py)
READY := $(VENV)/.ready
DOCS := .venv-docs

.DEFAULT_GOAL := help
.PHONY: help setup test test-quick test-gpu lint format demo models docs clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: $(READY)  ## make the virtual environment

# torch first and exactly: a range would let pip choose another build of it, with gigabytes beside it. And once more beside the
# rest: pip replaces a torch whose requirements do not fit theirs, and the tests would run on another release. Triton's interpreter
# tests our kernels: torch for CUDA brings a Triton, torch for CPUs does not.
$(READY): requirements-dev.txt requirements-models.txt models/torchvision_ops.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==$(TORCH)
	$(BIN)/python -m pip install torch==$(TORCH) --requirement requirements-dev.txt
	$(BIN)/python -c "import triton" 2> /dev/null || $(BIN)/python -m pip install "$(TRITON)"
	$(BIN)/python -m pip install --no-deps --requirement requirements-models.txt
	$(BIN)/python models/torchvision_ops.py
	$(BIN)/python -m pip install --no-deps --no-build-isolation --editable .
	touch $@

# Two workers, each with simulated ranks and gloo processes of its own: most tests keep one core busy.
test: lint  ## format, lint and type checks, then all tests
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-quick: $(READY)  ## the quick tests of every room, with a tenth of the random examples: for the edit loop
	$(BIN)/ruff check
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --quick

# Simulated ranks are on the GPU, and the processes of every file are ranks of NCCL that share it: docs/gpu_tests.md.
test-gpu: $(READY)  ## all tests of ops and models on one GPU, also with several ranks of NCCL
	TORCHHALO_TEST_DEVICE=cuda $(BIN)/python -m pytest --numprocesses 4 --dist worksteal $(GPU_TESTS)

# Types are checked against the pinned torch alone: the annotations of its private API differ from release to release.
lint: $(READY)  ## format, lint and type checks
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(if $(OTHER),@echo "types are checked with torch $(PINNED) only",$(BIN)/mypy)

format: $(READY)  ## format the code and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

demo: $(READY)  ## train on an image sharded over two local processes, beside one process
	$(BIN)/torchhalo demo

# In the environment of `setup`, which has the libraries. Results are kept in build/models: a run that was stopped goes on from there.
models: $(READY)  ## check all models of docs/models.md, sharded, beside one process, and write that page and docs/streamed.md (hours)
	$(BIN)/python -m models --jobs 2 --output docs/models.md --streamed docs/streamed.md

docs: $(DOCS)/.ready  ## build the site of docs/ in site/; a warning, such as of a broken link, fails
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.ready: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --requirement requirements-docs.txt
	touch $@

clean:  ## remove the environments, caches and build products
	rm -rf .venv .venv-* build dist site *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find torchhalo tests -name __pycache__ -type d -prune -exec rm -rf {} +
