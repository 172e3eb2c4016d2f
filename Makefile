# The front door. Every target sets up what it needs in .venv, from a bare Python 3.11 and PyPI alone;
# `make services` is the only one that calls apt-get.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-long services check lint types layers docs bench sim matrix lock format clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
FAST_TESTS := tests/tidy tests/unit tests/property tests/conformance tests/fuzz tests/simulation tests/integration
SEED ?=
SECONDS_OF_SIMULATION := $(if $(filter command line,$(origin SECONDS)),$(SECONDS),)
ONLY ?=
PROTOCOL ?=
WORLDS ?=

help:  ## this list
	@grep -E '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 12

# Installing: uv where there is one, else pip. A second run finds the stamp and starts at once.
INSTALL = if command -v uv >/dev/null; then uv pip install -q --python $(BIN)/python $(1); \
          else $(BIN)/python -m pip install -q --disable-pip-version-check $(1); fi

.venv/bin/python:
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"anabranch needs Python 3.11 or newer, this is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	@"$(PYTHON)" -m venv .venv

.venv/app.stamp: pyproject.toml | .venv/bin/python
	@echo "installing anabranch into .venv" >&2
	@$(call INSTALL,-c requirements/dev.txt -e .)
	@touch $@

.venv/dev.stamp: requirements/dev.txt .venv/app.stamp
	@echo "installing the development tools into .venv" >&2
	@$(call INSTALL,-r requirements/dev.txt)
	@touch $@

.venv/bench.stamp: requirements/bench.txt .venv/dev.stamp
	@echo "installing the peers that the benchmarks run beside ours" >&2
	@$(call INSTALL,-r requirements/bench.txt)
	@touch $@

demo: .venv/app.stamp  ## the product on a local Kinesis, no AWS account needed
	@$(BIN)/anabranch demo

test: .venv/dev.stamp  ## all tests that need only PyPI packages (about 3 minutes)
	@$(BIN)/python tests/run.py $(FAST_TESTS) -m "not long and not soak"

test-all: .venv/dev.stamp  ## adds real servers, processes, long simulation, examples
	@$(BIN)/python tests/run.py tests/property tests/conformance tests/integration tests/chaos tests/simulation -m "long or services"

test-long: .venv/dev.stamp  ## runs of minutes, by hand: all, or ONLY=fleet
	@$(PYTEST) tests -m soak -q -s $(if $(ONLY),-k "$(ONLY)")

services:  ## Redis, which test-all needs, from Debian's packages
	@.ci/services

check: lint types layers docs  ## the gates: ruff, mypy, import-linter, docs

lint: .venv/dev.stamp
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: .venv/dev.stamp
	@$(BIN)/mypy

layers: .venv/dev.stamp
	@$(BIN)/lint-imports

docs: .venv/dev.stamp  ## the documentation, warnings as errors
	@$(BIN)/sphinx-build -q -n -W --keep-going -b html docs docs/_build/html

format: .venv/dev.stamp  ## puts the code in shape
	@$(BIN)/ruff check --fix-only -q .
	@$(BIN)/ruff format -q .

bench: .venv/bench.stamp  ## all benchmarks, or ONLY=codec
	@$(BIN)/python benchmarks/run.py $(ONLY)

sim: .venv/dev.stamp  ## SEED=n replays a world; SECONDS=n or WORLDS=n tries fresh ones; PROTOCOL=1 for leases alone
	@$(BIN)/python $(if $(PROTOCOL),tests/simulation/protocol/run.py,-m anabranch.testing.sim) $(if $(SEED),--seed $(SEED)) \
	  $(if $(WORLDS),--worlds $(WORLDS)) $(if $(SECONDS_OF_SIMULATION),--seconds $(SECONDS_OF_SIMULATION))

matrix: .venv/dev.stamp  ## other Pythons and the oldest dependencies, where they are installed
	@$(BIN)/python tests/matrix.py

lock: | .venv/bin/python  ## writes the pinned requirements anew
	@$(BIN)/python -m pip install -q uv
	@$(BIN)/uv pip compile -q -U --no-header --universal --python-version 3.11 requirements/dev.in pyproject.toml --extra tls -o requirements/dev.txt
	@$(BIN)/uv pip compile -q -U --no-header --universal --python-version 3.11 requirements/bench.in -c requirements/dev.txt -o requirements/bench.txt

clean:  ## removes everything that make made
	@rm -rf .venv docs/_build dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
