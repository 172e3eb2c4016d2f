# The front door. Every target sets up what it needs in .venv, from a bare Python 3.11 and PyPI alone;
# `make services` is the only one that calls apt-get or npm's registry.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-compiled test-long wheels smoke services guard check lint types layers docs bench sim matrix \
  bench-kclpy example-model-serving lock format clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
FAST_TESTS := tests/tidy tests/unit tests/property tests/conformance tests/fuzz tests/simulation tests/integration
SEED ?=
SECONDS_OF_SIMULATION := $(if $(filter command line,$(origin SECONDS)),$(SECONDS),)
ONLY ?=
PROTOCOL ?=
WORLDS ?=

help:  ## lists the targets
	@grep -E '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 22

# Installing: uv where there is one, else pip. A second run finds the stamp and starts at once.
INSTALL = if command -v uv >/dev/null; then uv pip install -q --python $(BIN)/python $(1); \
          else $(BIN)/python -m pip install -q --disable-pip-version-check $(1); fi

# A .venv of somebody else, or one that was copied with its folder, would be changed or misused silently.
.PHONY: own-venv
own-venv:
	@if [ -e .venv ] && ! { [ -e .venv/made-by-make ] || [ -e .venv/app.stamp ]; } || \
	    { [ -e .venv ] && ! grep -qsF "$(CURDIR)/.venv" .venv/made-by-make .venv/pyvenv.cfg; }; then \
	  echo ".venv was not made by make in this folder: move it away, or remove it with 'make clean', and run make again" >&2; exit 2; fi

.venv/bin/python: | own-venv
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"anabranch needs Python 3.11 or newer, this is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	@"$(PYTHON)" -m venv .venv
	@echo "$(CURDIR)/.venv" > .venv/made-by-make

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

# It needs another aiobotocore than the tests, so it gets an environment of its own.
.venv/native-kcl/stamp: requirements/native-kcl.txt | .venv/bin/python
	@echo "installing native-aws-kcl-py for the benchmarks" >&2
	@"$(BIN)/python" -m venv .venv/native-kcl
	@.venv/native-kcl/bin/python -m pip install -q --disable-pip-version-check -r requirements/native-kcl.txt
	@touch $@

.venv/kclpy/stamp: requirements/kclpy.txt | .venv/bin/python
	@echo "installing kclpy for the benchmark" >&2
	@"$(BIN)/python" -m venv .venv/kclpy
	@.venv/kclpy/bin/python -m pip install -q --disable-pip-version-check -r requirements/kclpy.txt
	@touch $@

.venv/example.stamp: requirements/example.txt .venv/dev.stamp
	@echo "installing what examples/model_serving needs" >&2
	@$(call INSTALL,-r requirements/example.txt)
	@touch $@

.venv/demo.stamp: requirements/bench.txt .venv/app.stamp
	@$(call INSTALL,-c requirements/bench.txt -c requirements/dev.txt async-kinesis)
	@touch $@

demo: .venv/demo.stamp  ## runs a fleet on a local Kinesis, with an audit; needs no AWS account
	@$(BIN)/anabranch demo

test: .venv/dev.stamp  ## runs all tests that need only PyPI packages (under 5 minutes)
	@$(BIN)/python tests/run.py $(FAST_TESTS) -m "not long and not soak and not services"

test-all: .venv/example.stamp  ## runs the tests with real servers and processes, longer simulations, the examples
	@$(BIN)/python tests/run.py tests/property tests/conformance tests/integration tests/chaos tests/simulation -m "long or services"
	@$(MAKE) --no-print-directory test-compiled

test-compiled: .venv/dev.stamp  ## runs the tests of the codecs on the compiled wheel (part of test-all)
	@$(BIN)/python tests/compiled.py

test-long: .venv/example.stamp  ## runs the tests that take minutes: all, or ONLY=fleet
	@$(PYTEST) tests -m soak -q -s $(if $(ONLY),-k "$(ONLY)")

example-model-serving: .venv/example.stamp  ## runs a whole service on local servers, and kills some of its workers
	@$(BIN)/python examples/model_serving/run.py

services:  ## installs what test-all and guard need: Redis, Java, DynamoDB Local, promtool, valgrind
	@.ci/services

check: lint types layers docs  ## runs ruff, mypy, import-linter and the docs build

lint: .venv/dev.stamp
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: .venv/dev.stamp
	@$(BIN)/mypy

layers: .venv/dev.stamp
	@$(BIN)/lint-imports

docs: .venv/dev.stamp  ## builds the documentation, with warnings as errors
	@$(BIN)/sphinx-build -q -n -W --keep-going -b html docs docs/_build/html

format: .venv/dev.stamp  ## formats the code
	@$(BIN)/ruff check --fix-only -q .
	@$(BIN)/ruff format -q .

bench: .venv/bench.stamp .venv/native-kcl/stamp  ## runs all benchmarks, or ONLY=codec
	@$(BIN)/python benchmarks/run.py $(ONLY)

bench-kclpy: .venv/dev.stamp .venv/kclpy/stamp  ## compares with KCL and kclpy (needs services; 20 minutes), or ONLY="load idle"
	@$(BIN)/python benchmarks/kclpy.py $(if $(ONLY),--steps $(ONLY))

guard: .venv/dev.stamp  ## fails if a fixed run takes more instructions than before (callgrind)
	@$(BIN)/python benchmarks/instructions.py

sim: .venv/dev.stamp  ## SEED=n replays a simulation; SECONDS=n or WORLDS=n runs fresh ones; PROTOCOL=1: only leases
	@$(BIN)/python tests/simulation/$(if $(PROTOCOL),protocol/run.py,fleets.py) $(if $(SEED),--seed $(SEED)) \
	  $(if $(WORLDS),--worlds $(WORLDS)) $(if $(SECONDS_OF_SIMULATION),--seconds $(SECONDS_OF_SIMULATION))

matrix: .venv/dev.stamp  ## runs tests on other installed Pythons and with the oldest dependencies
	@$(BIN)/python tests/matrix.py

wheels: .venv/dev.stamp  ## builds the sdist, the pure wheel and the compiled wheel into dist
	@rm -rf dist
	@$(BIN)/python -m hatchling build -t sdist -t wheel
	@HATCH_BUILD_HOOK_ENABLE_MYPYC=1 $(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist dist/*.tar.gz
	@ls dist

smoke: wheels  ## installs each of them into a clean environment without extras, and uses it
	@$(BIN)/python tests/smoke.py dist

lock: | .venv/bin/python  ## updates the pinned requirements
	@$(BIN)/python -m pip install -q uv
	@$(BIN)/uv pip compile -q -U --no-header --universal --python-version 3.11 requirements/dev.in pyproject.toml --extra otel --extra prometheus --extra redis --extra tls -o requirements/dev.txt
	@$(BIN)/uv pip compile -q -U --no-header --universal --python-version 3.11 requirements/bench.in -c requirements/dev.txt -o requirements/bench.txt
	@echo native-aws-kcl-py | $(BIN)/uv pip compile -q -U --no-header --universal --python-version 3.11 - -o requirements/native-kcl.txt
	@echo kclpy-ext | $(BIN)/uv pip compile -q -U --no-header --universal --python-version 3.11 - -o requirements/kclpy.txt
	@$(BIN)/uv pip compile -q -U --no-header --universal --python-version 3.11 requirements/example.in -c requirements/dev.txt -o requirements/example.txt

clean:  ## removes everything that make made
	@rm -rf .venv docs/_build dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
