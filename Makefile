# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install serve lint test test-all test-gpu clean
.DEFAULT_GOAL := help

help:
	@echo "make serve      set up, fetch the default model, serve on 127.0.0.1:8000"
	@echo "make test       set up, lint, type-check, test"
	@echo "make test-all   the same with the longer checks"
	@echo "make test-gpu   the checks that need a CUDA device"
	@echo "make clean      remove the virtual environment and build files"

SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.* csrc/*/*)

# torch first, by its pin: left to itself pip would choose a build with gigabytes of CUDA.
define install_package
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '$(1)'
	touch $(VENV)/.runtime
endef

$(VENV)/.runtime: $(SOURCES)
	$(call install_package,.)

# Everything at once, so that the kernels are compiled once.
$(VENV)/.dev: $(SOURCES)
	$(call install_package,.[dev])
	touch $@

install: $(VENV)/.runtime

serve: install
	$(BIN)/tokenmill serve $(MODEL)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -m "not slow and not gpu"

test-all: lint
	$(BIN)/pytest -m "not gpu"

# With the machine's own Python: the virtual environment's torch is the CPU build.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu

clean:
	rm -rf $(VENV) build
