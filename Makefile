# Every target sets up the environment by itself; it needs Python 3.11+, make and a C++ compiler, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A tree of links that makes the folders one package `quire`, for tools that read source without importing it.
SOURCE := build/source/quire
FOLDERS := proto kernels worker scheduler cluster

.PHONY: help venv demo test test-all check layers proto figures clean

help:
	@echo "make demo      two tensor-parallel workers serve concurrent gRPC requests, then shut down"
	@echo "make test      the tests that need no GPU, without the slow ones (at most 15 minutes on two cores)"
	@echo "make test-all  the tests that need no GPU, including the slow ones"
	@echo "make check     linters, types, import layers, generated files"
	@echo "make layers    the import layers only"
	@echo "make proto     regenerate the gRPC code from the .proto files"
	@echo "make figures   regenerate docs/benchmarks.md from benchmarks/results/"
	@echo "make venv      the virtual environment .venv, which every target creates if it is missing"
	@echo "make clean     delete build outputs and caches"

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
