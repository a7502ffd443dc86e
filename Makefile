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

$(VENV)/.runtime: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.* csrc/*/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
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

test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu

clean:
	rm -rf $(VENV) build
