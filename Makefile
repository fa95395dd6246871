# Everything is made in its own virtual environment below .venvs, the first time it is needed.
# Needed on the machine: make, Python 3.11 or newer with venv, and a way to PyPI.

ARGS ?=
PYTEST_ARGS ?=
PYTHON ?= $(shell python3.11 -c '' >/dev/null 2>&1 && echo python3.11 || echo python3)
VERSION := $(shell $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) and print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

# The stamp carries the Python version: another PYTHON makes the environment anew instead of quietly using the old one.
DEMO := .venvs/demo/.made-$(VERSION)
TEST := .venvs/test/.made-$(VERSION)
BENCH := .venvs/bench/.made-$(VERSION)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench format clean drivers
.DELETE_ON_ERROR:

help:
	@echo 'make demo      a small classifier trained inside a memory budget    ARGS="--help" for options'
	@echo 'make test      lint, format check, type check, tests: what CI runs  PYTEST_ARGS="-k ledger"'
	@echo 'make test-all  the same, with the slow tests'
	@echo 'make bench     Penstock against its peers                           ARGS="--help" for options'
	@echo 'make format    put the code in shape'
	@echo 'make clean     remove everything that was made'

demo: $(DEMO)
	@.venvs/demo/bin/python -m penstock demo $(ARGS)

# Two at a time, file by file; those that measure memory from outside, leave things behind on
# purpose, or look for what anybody left, by themselves.
PYTEST := .venvs/test/bin/python -m pytest -q
ALONE := tests/memory tests/docs/test_house.py tests/chaos/test_endings.py
# Where a test takes its process with it, xdist would start another and then wait for ever: the run ends there, with its name.
TWO := -n 2 --dist loadfile --max-worker-restart 0 $(ALONE:%=--ignore %) tests

test: lint drivers
	@echo '== tests'
ifeq ($(PYTEST_ARGS),)
	@$(PYTEST) -m 'not slow' $(TWO)
	@$(PYTEST) -m 'not slow' $(ALONE)
else
	@$(PYTEST) -m 'not slow' $(PYTEST_ARGS)
endif

test-all: lint drivers
	@echo '== tests, the slow ones too'
ifeq ($(PYTEST_ARGS),)
	@$(PYTEST) $(TWO)
	@$(PYTEST) $(ALONE)
else
	@$(PYTEST) $(PYTEST_ARGS)
endif

lint: $(TEST)
	@echo '== ruff check'
	@.venvs/test/bin/ruff check --quiet .
	@echo '== ruff format --check'
	@.venvs/test/bin/ruff format --quiet --check .
	@echo '== mypy --strict'
	@.venvs/test/bin/mypy --no-error-summary

# What tinygrad needs from the system: clang for its CPU device, libOpenCL and a driver (PoCL, which runs on the processor)
# for its CL device. Tried once, only as root and only with apt; where it cannot be had, the tests that need it skip and say so.
drivers: .venvs/drivers.log
.venvs/drivers.log:
	@mkdir -p .venvs
	@if command -v clang >/dev/null && ls /etc/OpenCL/vendors/*.icd >/dev/null 2>&1 && ldconfig -p | grep -q libOpenCL.so; then \
	   echo 'clang, libOpenCL and a driver for it are there' > $@; \
	 elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	   echo '== apt-get install clang ocl-icd-libopencl1 pocl-opencl-icd (for the tests of tinygrad; tried once)'; \
	   { timeout 120 apt-get update -q && DEBIAN_FRONTEND=noninteractive timeout 600 \
	     apt-get install -q -y --no-install-recommends clang ocl-icd-libopencl1 pocl-opencl-icd; } > $@ 2>&1 </dev/null \
	   || echo '== that did not work ($@): tests that need them skip'; \
	 else echo 'clang, libOpenCL or a driver for it is missing, and only root can install them' > $@; fi

bench: $(BENCH)
	@.venvs/bench/bin/python -m penstock bench $(ARGS)

format: $(TEST)
	@.venvs/test/bin/ruff check --quiet --fix-only .
	@.venvs/test/bin/ruff format .

clean:
	rm -rf .venvs .bench .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# What each environment installs besides the package itself, which is editable: a change in src needs no new one.
$(DEMO): EXTRAS :=
$(TEST): EXTRAS := [test]
$(BENCH): EXTRAS := [bench]

$(DEMO) $(TEST) $(BENCH): pyproject.toml
	@test -n '$(VERSION)' || { echo '$(PYTHON) is missing or older than Python 3.11: say which to use, as in make PYTHON=python3.12'; exit 1; }
	@echo '== making $(@D) with Python $(VERSION) (once; a minute or two where torch is part of it)'
	@mkdir -p .venvs
	@{ $(PYTHON) -m venv --clear $(@D) && \
	   $(@D)/bin/python -m pip install --disable-pip-version-check --editable '.$(EXTRAS)'; \
	 } > $(@D).log 2>&1 || { cat $(@D).log; echo '== $(@D) could not be made; the log above is in $(@D).log'; exit 1; }
	@touch $@
