# Everything sets itself up: `make demo` and `make test` need Python 3.11+, make and a C++ compiler, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A tree in which the folders stand as the package `quire`, for the tools that read source and not imports.
SOURCE := build/source/quire
FOLDERS := proto kernels worker scheduler cluster

.PHONY: help venv demo test test-all check layers proto figures clean

help:
	@echo "make demo      run the main job: two tensor-parallel workers answer concurrent gRPC requests"
	@echo "make test      the tests (15 minutes at most on two cores)"
	@echo "make test-all  the slow tests too"
	@echo "make check     linters, types, import layers, generated code"
	@echo "make proto     generate the gRPC code anew"
	@echo "make figures   regenerate docs/benchmarks.md from benchmarks/results/"
	@echo "make venv      the environment that all of these make by themselves"

venv: $(READY)

$(READY): pyproject.toml setup.py constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: venv
	$(BIN)/python -m quire.cluster.demo

test: venv
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: venv
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

check: venv $(SOURCE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=build/source $(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check
	$(BIN)/python -m benchmarks.figures_page --check

layers: venv $(SOURCE)
	PYTHONPATH=build/source $(BIN)/lint-imports

proto: venv
	$(BIN)/python proto/generate.py

figures: venv
	$(BIN)/python -m benchmarks.figures_page

$(SOURCE): Makefile
	@rm -rf $@ && mkdir -p $@
	@for name in $(FOLDERS) __init__.py py.typed; do ln -s ../../../$$name $@/$$name; done

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
