# `make` alone lists the targets. Every target installs what it needs: Python and make are the only requirements.

PYTHON ?= python3
ARGS ?=
# Processes of pytest. Each has a Ray cluster of its own; tests of real processes wait more than they compute.
JOBS ?= 2
# The areas of `make test-rest`: all of them, unless given.
AREA ?=
# Seconds of `make soak`, which are shared by its five kinds of runs.
SOAK_S ?= 1200
# The gate's minutes include its set-up.
BEGAN := $(shell date +%s)

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python tools/uv.py pip install -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
RUN_TESTS := $(BIN)/python tools/run_tests.py --jobs $(JOBS)
# Tests start some thousand processes: where PYTHONDONTWRITEBYTECODE is set, each of them would compile the modules again.
COMPILE := $(BIN)/python -m compileall -q raysgd tests examples benchmarks
SOURCES := raysgd tests examples benchmarks tools setup.py

# `make gpu` installs nothing: it takes this environment if it is there, or the Python that is given.
GPU_PYTHON := $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(BIN)/python,$(PYTHON))

# What is installed so far.
RUN := $(VENV)/run.stamp
LINT := $(VENV)/lint.stamp
TEST := $(VENV)/test.stamp
JAX := $(VENV)/jax.stamp
TENSORFLOW := $(VENV)/tensorflow.stamp
HOROVOD := $(VENV)/horovod.stamp
DOC := $(VENV)/doc.stamp

.DEFAULT_GOAL := help
.PHONY: help train quick test test-rest test-all nightly slow schedules loops alone soak kills cuts matrix mutations lint format gpu bench bench-check bench-quick doc wheel horovod browser pin clean
# One target at a time: they share the environment, and tests and benchmarks need the machine to themselves.
.NOTPARALLEL:

help:  ## This page
	@echo "raysgd: distributed training on Ray"
	@echo
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'
	@echo
	@echo "  PYTHON=python3.11   the Python (3.10 or newer) that makes the environment"
	@echo "  ARGS=\"...\"          more arguments for the example (train), pytest (quick, test ...) or the comparison (bench)"
	@echo "  JOBS=2              processes of pytest"
	@echo "  AREA=\"data tune\"    areas of the tests (test-rest), see CONTRIBUTING.md"
	@echo "  SOAK_S=1200         seconds of faults (soak)"
	@echo
	@echo "Each target but gpu first makes or completes the environment in $(VENV)."

train: $(RUN)  ## Train a small network on handwritten digits with two workers
	@$(BIN)/python examples/01_digits.py $(ARGS)

quick: $(TEST)  ## Unit tests without TensorFlow and JAX (3 minutes)
	@$(PYTEST) -q -m "not tensorflow and not jax" tests/unit tests/architecture tests/conformance/test_storages.py $(ARGS)

# A Horovod that was built before is installed; nothing is built, and its tests are skipped by name where there is none.
test: $(JAX)  ## The gate: lint, types, layers, unit tests, and one test of real processes for each promise (15 minutes)
	@sh tools/build_horovod.sh $(VENV) --if-kept
	@$(COMPILE)
	@$(RUN_TESTS) --since $(BEGAN) gate -- $(ARGS)

test-rest: $(TENSORFLOW) $(DOC)  ## The tests of real processes that `make test` leaves out, all or those of an AREA
	@sh tools/build_horovod.sh $(VENV) --if-kept
	@$(COMPILE)
	@$(RUN_TESTS) rest $(AREA) -- $(ARGS)

test-all:  ## Both
	@$(MAKE) --no-print-directory test && $(MAKE) --no-print-directory test-rest

nightly: horovod browser $(DOC)  ## What takes long, before a release: timing, schedules, wheel, large benchmarks, soak, matrix (two hours)
	@$(COMPILE)
	@$(RUN_TESTS) nightly -- $(ARGS)

slow: $(HOROVOD)  ## The tests that take long
	@$(PYTEST) -q -m nightly tests $(ARGS)

alone: $(HOROVOD)  ## The tests that measure time: nothing else may run on the machine
	@$(BIN)/python -m pytest -q -m alone tests/integration $(ARGS)

schedules: $(TEST)  ## Ten thousand schedules of a run, without processes (a minute)
	@RAYSGD_SCHEDULES=10000 $(BIN)/python -m pytest -q -n $(JOBS) tests/unit/test_controller_fuzz.py tests/unit/test_controller_live_policy.py $(ARGS)

# With another seed each night.
loops: $(TEST)  ## Two thousand loops of users with the engine, against the plain loop (10 minutes)
	@RAYSGD_LOOPS=2000 RAYSGD_LOOPS_SEED=$(BEGAN) $(BIN)/python -m pytest -q tests/integration/test_engine_loops.py $(ARGS)

soak: $(HOROVOD)  ## Kill and stop the processes of real runs at random times, and check what they leave (SOAK_S=1200 seconds)
	@RAYSGD_FUZZ_S=$$(($(SOAK_S) / 5)) $(BIN)/python -m pytest -n0 -s -o timeout=0 tests/fault/test_process_fuzz.py $(ARGS)

# With other plans each night.
kills: $(TEST)  ## Kill ranks of trainings with a live state 200 times, and compare the final weights (30 minutes)
	@RAYSGD_KILLS=200 RAYSGD_KILLS_SEED=$(BEGAN) $(BIN)/python -m pytest -n0 -s tests/fault/test_live_kills.py $(ARGS)

# With other schedules each night; skipped where machines cannot be made.
cuts: $(TEST)  ## Five random schedules of pulled cables and lost machines, as root
	@RAYSGD_CUTS=5 RAYSGD_CUTS_SEED=$(BEGAN) $(BIN)/python -m pytest -n0 -s tests/fault/test_random_cuts.py $(ARGS)

matrix: $(TEST)  ## Every combination of the engine's strategies against the plain loop (an hour)
	@RAYSGD_MATRIX=all RAYSGD_MATRIX_PAGE=doc/benchmarks/matrix.md $(BIN)/python -m pytest -q tests/integration/test_engine_matrix.py::test_losses_and_parameters_are_those_of_the_plain_loop $(ARGS)

# With another sample each night.
mutations: $(JAX)  ## Change the package in a hundred places of each folder, and list what no test notices (ARGS="raysgd/session --sample 40")
	@$(COMPILE)
	@$(BIN)/python tools/mutations.py --seed $(BEGAN) $(ARGS)

# With the packages of the tests: the types of pytest and IPython are checked against.
lint: $(TEST)  ## Lint, format, types and layers, without changing anything
	@echo "lint: ruff check";  $(BIN)/ruff check --quiet .
	@echo "lint: ruff format"; $(BIN)/ruff format --check --quiet .
	@echo "lint: mypy";        $(BIN)/mypy --no-error-summary
	@echo "lint: layers";      $(BIN)/lint-imports --no-logo >$(VENV)/layers.log || { cat $(VENV)/layers.log; exit 1; }

format: $(LINT)  ## Format the code and apply the fixes that are safe
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

# All parts run, whatever the others did. On a machine with torch, NumPy, pyarrow and pytest alone, what needs Ray is skipped.
gpu:  ## The tests that need a GPU, and figures for doc/benchmarks/gpu.md and gpu_models.md (8 minutes at most, installs nothing)
	@timeout 200 $(GPU_PYTHON) -m pytest tests/gpu $(ARGS); tests=$$?; \
	timeout 110 $(GPU_PYTHON) benchmarks/gpu.py; figures=$$?; \
	timeout 165 $(GPU_PYTHON) benchmarks/gpu_models.py; models=$$?; \
	test $$tests$$figures$$models = 000 || { echo "gpu: the tests ended with status $$tests, the benchmarks with $$figures and $$models (124: out of time)"; exit 1; }

bench: $(HOROVOD)  ## Compare raysgd with Ray Train and others; results go to doc/benchmarks/
	@$(BIN)/python benchmarks/vs_ray_train.py $(ARGS)
	@$(BIN)/python benchmarks/scale.py
	@$(BIN)/python benchmarks/recovery.py
	@$(BIN)/python benchmarks/ingest.py
	@$(BIN)/python benchmarks/tune.py
	@$(BIN)/python benchmarks/backends.py
	@$(BIN)/python benchmarks/engine.py
	@$(BIN)/python benchmarks/functions.py
	@$(BIN)/python benchmarks/logical.py
	@$(BIN)/python benchmarks/live.py
	@$(BIN)/python benchmarks/why.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/declarative.py

# Their figures say nothing. Not in `make test-all`: nearly all of their time is the start of processes.
bench-check: $(HOROVOD)  ## Run the large benchmarks as briefly as possible: do they work? (15 minutes)
	@$(BIN)/python -m pytest -m benchmark tests/integration/test_benchmarks_run.py $(ARGS)

# What people feel, in ten minutes; the others' figures are those of the pages.
bench-quick: $(TEST)  ## Measure raysgd alone, once, next to the published figures; changes no page (10 minutes)
	@$(BIN)/python benchmarks/vs_ray_train.py --own --only report_cost --only latency --only rate --only exception --only start --only checkpoint --only memory $(ARGS)
	@$(BIN)/python benchmarks/recovery.py --own --only kill $(ARGS)

doc: $(DOC)  ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

wheel: $(RUN)  ## Build the wheel in dist/, and run the quickstart and a training with it in an empty environment
	@sh tools/check_wheel.sh $(VENV)

horovod: $(TENSORFLOW)  ## Build Horovod for the torch and TensorFlow that are installed here (a few minutes, once)
	@sh tools/build_horovod.sh $(VENV)
	@touch $(HOROVOD)

browser:  ## Find a Chromium for the tests of the page of runs, or install Debian's (as root)
	@sh tools/get_browser.sh

# Versions that constraints.txt has are kept where they are still allowed: remove a line to get the newest. torch itself
# pins its CUDA packages. Python 3.10 is not pinned: many newest versions do not support it.
pin: $(RUN)  ## Write constraints.txt again, after a change of setup.py
	@$(BIN)/python tools/uv.py pip compile setup.py --all-extras --no-annotate --no-header -o constraints.txt >$(VENV)/pin.log
	@sed -i -E '/^(nvidia|cuda|triton)-?/d; s/\+[^ ;]+//; s/;.*//; s/ *$$/; python_version >= "3.11"/' constraints.txt
	@sed -i '1i # The versions that the tests run with, written by `make pin`. setup.py has the versions that are allowed.' constraints.txt

clean:  ## Remove caches and built files; the environment stays
	@rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find $(wildcard $(SOURCES)) -type d -name __pycache__ -prune -exec rm -rf {} +

# ------------------------------------------------------------------------------------------------- the environment

# torch first and by itself: its exact version, so that no later requirement can pull in another build of it.
$(RUN): setup.py constraints.txt tools/make_venv.sh tools/uv.py
	@sh tools/make_venv.sh "$(PYTHON)" $(VENV)
	@echo "set-up: torch (some hundred MB)"
	@$(INSTALL) $(shell grep -oE '^torch==[^ ;]+' constraints.txt)
	@echo "set-up: raysgd, Ray and what the examples need"
	@$(INSTALL) -e '.[torch,examples]'
	@touch $@

$(LINT): $(RUN)
	@echo "set-up: ruff, mypy, import-linter"
	@$(INSTALL) -e '.[lint]'
	@touch $@

$(TEST): $(LINT)
	@echo "set-up: pytest, MLflow, W&B and what else tests need"
	@$(INSTALL) -e '.[test,mlflow,wandb]'
	@touch $@

$(JAX): $(TEST)
	@echo "set-up: JAX (some hundred MB more)"
	@$(INSTALL) -e '.[jax,functions,flax]'
	@touch $@

$(TENSORFLOW): $(JAX)
	@echo "set-up: TensorFlow (some hundred MB more)"
	@$(INSTALL) -e '.[tensorflow]'
	@touch $@

# Its tests are skipped by name where it cannot be built, such as without a C++ compiler.
$(HOROVOD): $(TENSORFLOW) tools/build_horovod.sh
	@sh tools/build_horovod.sh $(VENV) --if-possible
	@touch $@

$(DOC): $(RUN)
	@echo "set-up: mkdocs"
	@$(INSTALL) -e '.[doc]'
	@touch $@
