# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install serve lint test test-all test-gpu sanitize wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make serve      set up, fetch the default model, serve on 127.0.0.1:8000"
	@echo "make test       set up, lint, type-check, test"
	@echo "make test-all   the same with the longer checks, coverage and the slowest tests"
	@echo "make test-gpu   the checks that need a CUDA device"
	@echo "make sanitize   the native kernels under AddressSanitizer and UBSan (g++; about ten minutes)"
	@echo "make wheel      a package for other machines, that installs without a compiler (ARCH=aarch64: for ARM)"
	@echo "make clean      remove the virtual environment and build files"

SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.* csrc/*/*)

# An installation notes where each module lies; when one comes, goes or moves (`git pull`), it is noted again.
MODULES := $(shell find tokenmill -name '*.py' | LC_ALL=C sort | cksum | cut -d ' ' -f 1)
RUNTIME := $(VENV)/.runtime-$(MODULES)
DEV := $(VENV)/.dev-$(MODULES)

# torch first, so that whatever else is installed fits the build that was found. Build tools by their pins, and in one
# place, so that what is compiled once stays compiled.
# A Python that is too old is told before anything is installed; an environment of another Python than this one is made anew.
CHECK_PYTHON := import sys; v = sys.version_info[:2]; \
  sys.exit(None if (3, 11) <= v else f"Tokenmill needs Python 3.11 to 3.13, and $(PYTHON) is {v[0]}.{v[1]}. " \
  "Install a newer one (python.org, packages of your system, or uv python install 3.12), then: make PYTHON=python3.12 $(or $(MAKECMDGOALS),install)")
SAME_PYTHON := import sys; print(*sys.version_info[:2])

define install_package
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@test ! -e $(VENV) || test "$$($(BIN)/python -c '$(SAME_PYTHON)' 2>/dev/null)" = "$$($(PYTHON) -c '$(SAME_PYTHON)')" || { echo "$(VENV) was made by another Python: making it anew"; rm -rf $(VENV); }
	@echo "Installing libraries and compiling kernels: some minutes the first time, seconds later."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '$(1)'
	touch $(RUNTIME)
endef

$(RUNTIME): $(SOURCES)
	$(call install_package,.)

# Everything at once, so that the kernels are compiled once.
$(DEV): $(SOURCES)
	$(call install_package,.[dev])
	touch $@

install: $(RUNTIME)

serve: install
	$(BIN)/tokenmill serve $(MODEL)

# Types take longest by far; the other checks run beside them, and what `make test` wants done by then (BESIDE_TYPES).
lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(BIN)/lint-imports && $(BIN)/python tools/check_house.py; rest=$$?; $(BESIDE_TYPES) wait $$types && exit $$rest

# One file's tests stay in one process. The interpreter of Triton is chosen once in a process, so its tests run apart;
# tests that measure time have the machine to themselves.
WORKERS ?= 2
PYTEST := $(BIN)/pytest -n $(WORKERS)
SERIAL_FILES = $(shell grep -rl --include='*.py' 'mark\.serial' tests)
# Files are given out in the order of `tests/long_files.txt`, so that no worker begins a long one last.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Tests start hundreds of programs: a setting that keeps Python from keeping what it compiled would cost each of them. All
# test modules are compiled once beforehand, not by each worker.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test test-all: BESIDE_TYPES = $(BIN)/pytest --collect-only -q > /dev/null 2>&1;

test: lint
	$(PYTEST) $(BY_FILE) -m "not slow and not gpu and not serial"
	$(PYTEST) tests/triton_interpreted -m "not slow"
	$(BIN)/pytest -m "serial and not slow and not gpu" $(SERIAL_FILES)

# Coverage is of the processes that pytest itself starts, not of servers and programs that tests start.
REPORTS := build/test-reports
COVERED := --cov --cov-append --cov-report=

# Property tests look for new examples here; in `make test` they try the same ones each time.
test-all: export HYPOTHESIS_PROFILE := random
test-all: lint
	rm -rf $(REPORTS) && mkdir -p $(REPORTS)
	$(PYTEST) $(BY_FILE) -m "not gpu and not serial" $(COVERED) --junitxml=$(REPORTS)/all.xml
	$(PYTEST) tests/triton_interpreted $(COVERED) --junitxml=$(REPORTS)/interpreted.xml
	$(BIN)/pytest -m "serial and not gpu" $(SERIAL_FILES) $(COVERED) --junitxml=$(REPORTS)/serial.xml
	$(BIN)/coverage report
	$(BIN)/python tools/slowest_tests.py $(REPORTS)

# With the machine's own Python: the virtual environment's torch is the CPU build.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu

# A build of its own, which stands in for the installed one. The libraries come first in the process, as they must in one
# that was not built with them; what Python never gives back is no leak of ours.
SANITIZED := build/sanitize
sanitize: $(DEV)
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B $(SANITIZED) -G Ninja -DTOKENMILL_SANITIZE=address,undefined \
		-DCMAKE_CXX_COMPILER=g++ -DPython_EXECUTABLE=$(abspath $(BIN))/python
	PATH="$(abspath $(BIN)):$$PATH" cmake --build $(SANITIZED) --target _native
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
		$(BIN)/pytest -s -m "not slow and not gpu" -k "not smollm2" --native $$(echo $(SANITIZED)/_native.*.so) \
		tests/ops_cpu tests/sampling/test_native_draws.py tests/weights/test_packed_cache.py

# For other machines: any Linux with glibc 2.28, without a compiler. ARCH=aarch64: for ARM, from here.
ARCH ?= $(shell uname -m)
wheel:
	$(PYTHON) tools/build_wheel.py dist --arch $(ARCH)

clean:
	rm -rf $(VENV) build
