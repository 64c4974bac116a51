# `make` alone lists what there is. Every target does its own set-up: Python and make are all that is needed.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
EXTRAS := torch,mlflow,wandb,dev,doc
# Large, and for the tests and the benchmarks alone.
FRAMEWORKS := $(VENV)/frameworks.stamp
HOROVOD := $(VENV)/horovod.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SOURCES := raysgd tests examples benchmarks tools setup.py

.DEFAULT_GOAL := help
.PHONY: help setup train test long unit lint format bench doc horovod clean
# One target at a time: they share the environment, and tests and benchmarks need the machine to themselves.
.NOTPARALLEL:

help:  ## This page
	@echo "raysgd: distributed training on Ray"
	@echo
	@grep -hE '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{ printf "  make %-8s %s\n", $$1, $$2 }'
	@echo
	@echo "  PYTHON=python3.11   the Python (3.10 or newer) that the environment is made with"
	@echo "  ARGS=\"...\"          passed on to the example (train), pytest (test, unit) or the comparison (bench)"
	@echo
	@echo "Each target first makes the environment in $(VENV), where it is missing or out of date."

train: setup  ## Train a small network on handwritten digits with two workers
	@$(BIN)/python examples/01_digits.py $(ARGS)

test: lint $(HOROVOD)  ## Everything: lint, types, layers, and all tests but the long ones
	@echo "tests"
	@$(BIN)/python -m pytest -m "not long" $(ARGS)

long: $(HOROVOD)  ## The tests that take long, and show nearly what others do
	@$(BIN)/python -m pytest -m long $(ARGS)

unit: $(FRAMEWORKS)  ## The quick tests only
	@$(BIN)/python -m pytest -m "not slow" tests/unit tests/architecture tests/docs $(ARGS)

lint: setup  ## Lint, format, types and layers, without changing anything
	@echo "lint: ruff check";  $(BIN)/ruff check --quiet .
	@echo "lint: ruff format"; $(BIN)/ruff format --check --quiet .
	@echo "lint: mypy";        $(BIN)/mypy --no-error-summary
	@echo "lint: layers";      $(BIN)/lint-imports --no-logo >$(VENV)/layers.log || { cat $(VENV)/layers.log; exit 1; }

format: setup  ## Format the code and apply the fixes that are safe
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

bench: $(HOROVOD)  ## Measure raysgd beside Ray Train and others; results go to doc/benchmarks/
	@$(BIN)/python benchmarks/vs_ray_train.py $(ARGS)
	@$(BIN)/python benchmarks/scale.py
	@$(BIN)/python benchmarks/recovery.py
	@$(BIN)/python benchmarks/ingest.py
	@$(BIN)/python benchmarks/tune.py
	@$(BIN)/python benchmarks/backends.py

doc: setup  ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

horovod: $(FRAMEWORKS)  ## Build Horovod for the torch and TensorFlow that are installed here (a few minutes, once)
	@sh tools/build_horovod.sh $(VENV)
	@touch $(HOROVOD)

clean:  ## Remove caches and built files; the environment stays
	@rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find $(wildcard $(SOURCES)) -type d -name __pycache__ -prune -exec rm -rf {} +

# ------------------------------------------------------------------------------------------------- the environment

setup: $(STAMP)

# torch first and by itself: its exact version, so that no later requirement can pull in another build of it.
$(STAMP): setup.py constraints.txt tools/make_venv.sh
	@sh tools/make_venv.sh "$(PYTHON)" $(VENV)
	@echo "set-up 2/3: torch (some hundred MB, unless it is there already)"
	@$(PIP) install -c constraints.txt torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	@echo "set-up 3/3: raysgd and all that its tests and examples need (a few minutes when nothing is cached)"
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

$(FRAMEWORKS): $(STAMP)
	@echo "set-up: TensorFlow and JAX (some hundred MB more)"
	@$(PIP) install -c constraints.txt -e '.[tensorflow,jax]'
	@touch $@

# Its tests are skipped by name where it cannot be built, such as without a C++ compiler.
$(HOROVOD): $(FRAMEWORKS) tools/build_horovod.sh
	@sh tools/build_horovod.sh $(VENV) --if-possible
	@touch $@
