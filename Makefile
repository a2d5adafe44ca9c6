# Every target does its own set-up (scripts/setup.sh): a .venv in this folder, quick when repeated.
#   make demo ARGS="--epochs 2"    arguments for the demo
#   make test ARGS="-k schedule"   arguments for pytest
#   make PYTHON=python3.12 ...     another Python;   make TORCH=torch==2.12.0 ...  another PyTorch
# All paths are relative, so the folder's own path may hold spaces.

SHELL := /bin/sh
PY := .venv/bin/python
JOBS ?= 2
ARGS ?=
export PYTHON TORCH

# One thread a test worker: workers share the cores, and the bits do not depend on the machine's number of cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest
PARALLEL := -n $(JOBS) --dist worksteal

.PHONY: help demo test test-all check check-lint check-format check-types check-layers check-spelling format bench zoo docs \
	coverage clean setup-demo setup-dev
.DEFAULT_GOAL := help

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

demo: setup-demo ## train a sliced model on real handwritten digits
	@.venv/bin/torchslicer demo $(ARGS)

test: setup-dev ## run the tests, except the slow ones
	$(PYTEST) $(PARALLEL) -m "not slow" $(ARGS)

test-all: setup-dev ## run all tests
	$(PYTEST) $(PARALLEL) $(ARGS)

check: check-lint check-format check-types check-layers check-spelling ## all checks; `make -k check` goes on after a failure

check-lint: setup-dev
	$(PY) -m ruff check .

check-format: setup-dev
	$(PY) -m ruff format --check .

check-types: setup-dev
	$(PY) -m mypy

check-layers: setup-dev
	$(PY) -c "from importlinter.cli import lint_imports_command as main; main(['--no-logo'])"

check-spelling: setup-dev
	$(PY) -m codespell_lib

format: setup-dev ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup-dev ## run the benchmarks, a folder for each question
	@for script in benchmarks/*/run.py; do echo "== $$script"; $(PY) "$$script" $(ARGS) || exit 1; done

zoo: setup-dev ## slice every torchvision model and write docs/coverage.md
	$(PY) scripts/zoo.py $(ARGS)

docs: setup-dev ## run every example of README, docs/ and the docstrings
	$(PYTEST) tests/docs $(ARGS)

coverage: setup-dev ## run the tests with branch coverage
	$(PYTEST) $(PARALLEL) -m "not slow" --cov --cov-report=term $(ARGS)

clean: ## remove the environment and all caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build .coverage

setup-demo:
	@sh scripts/setup.sh demo

setup-dev:
	@sh scripts/setup.sh dev
