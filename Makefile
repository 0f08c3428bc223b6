# Every target sets up the environment by itself; it needs Python 3.11+, make and a C++ compiler, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A tree of links that makes the folders one package `quire`, for tools that read source without importing it.
SOURCE := build/source/quire
FOLDERS := proto kernels worker scheduler cluster
# The Triton versions that the supported PyTorch versions require (2.11; 2.12 and 2.13; 2.14; 2.15) and tests of the kernels.
TRITON_VERSIONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
TRITON_TESTS := tests/kernels tests/worker/test_triton_path.py
# Processes of tests import our modules up to 0.5 s faster if the modules' bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE
# Processes that run tests. Each file runs in one of them, and all files that start Ray in the same one. Three suit two
# cores, since tests of servers wait: with two processes `.ci/run` used 1.2 cores. Each process takes 2 GB.
JOBS ?= 3
IN_PROCESSES := -n $(JOBS) --dist loadgroup --no-loadscope-reorder
# The supported Python versions and the index of `make check-install`; those that are missing are skipped.
PYTHONS ?= python3.11 python3.12 python3.13
INDEX ?= https://pypi.org/simple
# The environments of the clients in tests/clients, each apart from .venv; openai_js needs node and npm.
CLIENTS := openai_js langchain llama_index litellm aiperf schemathesis

# The platforms of the wheels that bring the C++ ops. zig's clang compiles for each of them on any machine.
WHEEL_PLATFORMS := manylinux_2_28_x86_64 manylinux_2_28_aarch64
WHEEL_TOOLS := build/wheel-tools
# hadolint, Helm and the schemas of Kubernetes, for tests/deploy.
DEPLOY_TOOLS := build/deploy-tools
LOCK_TOOLS := build/lock-tools

.PHONY: help venv demo test test-again test-all test-random test-triton test-clients check check-install layers proto proto-release metrics figures wheel wheels docs test-deploy lock audit clean

help:
	@echo "make demo      two tensor-parallel workers serve concurrent gRPC requests, then shut down"
	@echo "make test      the tests that need no GPU, without the slow ones (15 to 45 minutes on two cores, by the processor)"
	@echo "make test-again     once more, one by one, the tests that failed in the last run"
	@echo "make test-all  the tests that need no GPU, including the slow ones"
	@echo "make test-random    the tests of make test in random order; prints the seed"
	@echo "make test-triton    the Triton kernels, interpreted, with each supported Triton"
	@echo "make test-clients   HTTP clients and a load generator of others, each in its own environment; needs node"
	@echo "make test-deploy    the container files and the Helm chart, with hadolint, Helm and the schemas of Kubernetes"
	@echo "make check     linters, types, import layers, generated files, compatibility of the gRPC interface"
	@echo "make check-install  resolve the environment against a plain package index, for each Python that is present"
	@echo "make layers    the import layers only"
	@echo "make proto     regenerate the gRPC code from the .proto files"
	@echo "make proto-release  record the .proto files as the interface that must stay compatible; for each release"
	@echo "make metrics   regenerate the dashboard, the alert rules and docs/metrics.md from the metrics' definitions"
	@echo "make wheel     a wheel with the C++ ops of this processor, in dist/; a minute or two"
	@echo "make wheels    an sdist and the wheels, with the C++ ops of each platform, in dist/"
	@echo "make docs      the site of the docs, in build/site/"
	@echo "make lock      requirements.lock: all dependencies with versions and hashes"
	@echo "make audit     ask the vulnerability databases for the locked dependencies"
	@echo "make figures   regenerate docs/benchmarks.md from benchmarks/results/"
	@echo "make venv      the virtual environment .venv, which every target creates if it is missing"
	@echo "make clean     delete build outputs and caches"

venv: $(READY)

$(READY): pyproject.toml setup.py constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: venv
	$(BIN)/python -m quire.cluster.cli.demo

test: venv
	$(BIN)/python -m pytest $(IN_PROCESSES) -m "not slow and not gpu" $(PYTEST_ARGS)

# --maxfail: what fails twice is certain, and the rest of it can wait.
# After a run that broke off, or that left processes, the failed tests are not all that was wrong: see tests/conftest.py.
test-again: venv
	@grep -q true .pytest_cache/v/quire/only_failed_tests || { echo "make test-again: the last run has failed otherwise"; exit 1; }
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PYTEST_ARGS) --last-failed --last-failed-no-failures none --maxfail 1

test-all: venv $(TRITON_VERSIONS:%=build/triton/%/.ready)
	$(BIN)/python -m pytest $(IN_PROCESSES) -m "not gpu" $(PYTEST_ARGS)

test-random: venv
	$(BIN)/python -m pytest $(IN_PROCESSES) -m "not slow and not gpu" $(PYTEST_ARGS) --random-order

test-clients: venv $(CLIENTS:%=build/clients/%/.ready)
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/clients

.PRECIOUS: build/clients/%/.ready

build/clients/openai_js/.ready: tests/clients/environments/openai_js/package.json
	mkdir -p $(@D) && cp $< $(@D)
	npm install --prefix $(@D) --no-audit --no-fund
	@touch $@

build/clients/%/.ready: tests/clients/environments/%.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --requirement $<
	@touch $@

test-deploy: venv $(DEPLOY_TOOLS)/.ready
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/deploy

$(DEPLOY_TOOLS)/.ready: tests/deploy/environment.txt
	$(PYTHON) -m venv --clear $(DEPLOY_TOOLS)
	$(DEPLOY_TOOLS)/bin/python -m pip install --quiet --requirement $<
	@touch $@

test-triton: $(TRITON_VERSIONS:%=test-triton-%)

.PRECIOUS: build/triton/%/.ready

# NumPy 2.4 no longer converts arrays of one element to numbers, as the interpreter of Triton 3.6 does.
build/triton/%/.ready: | venv
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) triton==$* $(if $(filter 3.6.%,$*),'numpy<2.4')
	@touch $@

test-triton-%: build/triton/%/.ready
	PYTHONPATH=build/triton/$* $(BIN)/python -c "import triton; assert triton.__version__ == '$*', triton.__version__"
	PYTHONPATH=build/triton/$* $(BIN)/python -m pytest -m "not gpu" --ignore tests/kernels/native \
		--deselect tests/kernels/test_compiles.py $(TRITON_TESTS) \
		$(PYTEST_ARGS)

check: venv $(SOURCE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=build/source $(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check
	$(BIN)/buf lint
	$(BIN)/buf breaking --against proto/released.binpb
	$(BIN)/python -m benchmarks.figures_page --check
	PYTHONPATH=build/source $(BIN)/python -m quire.cluster.gateway.metrics.generate --check

check-install:
	@for python in $(PYTHONS); do \
		$$python -c "" 2>/dev/null || { echo "$$python is not present"; continue; }; \
		$$python -m venv --clear build/install/$$python && \
		env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null build/install/$$python/bin/python -m pip \
			install --quiet --dry-run --report build/install/$$python.json --index-url $(INDEX) \
			--constraint constraints.txt --editable '.[dev]' && echo "$$python: resolved" || exit 1; \
	done

layers: venv $(SOURCE)
	PYTHONPATH=build/source $(BIN)/lint-imports

proto: venv
	$(BIN)/python proto/generate.py

# The file names of the modules in proto/released.binpb are those that buf.yaml gives them.
proto-release: venv
	$(BIN)/buf build -o proto/released.binpb

metrics: venv $(SOURCE)
	PYTHONPATH=build/source $(BIN)/python -m quire.cluster.gateway.metrics.generate

wheel: venv
	$(BIN)/python -m pip wheel --verbose --no-deps --wheel-dir dist . 2>&1 | grep --line-buffered -E "compiling ops|cannot be built| error: "; \
	ls -l dist/quire-*linux_*.whl

# An sdist, a wheel per platform, and a pure wheel whose ops are compiled on first use, all in dist/.
wheels: $(WHEEL_TOOLS)/.ready $(WHEEL_PLATFORMS:%=dist/.%)
	QUIRE_WHEEL_PLATFORM=any $(WHEEL_TOOLS)/bin/python -m build --quiet --outdir dist .
	$(WHEEL_TOOLS)/bin/twine check --strict dist/*.whl dist/*.tar.gz
	$(WHEEL_TOOLS)/bin/check-wheel-contents dist/*.whl
	ls -l dist

# Compiles for each instruction set of the platform: up to an hour for both platforms on two busy cores.
dist/.%: $(WHEEL_TOOLS)/.ready
	QUIRE_WHEEL_PLATFORM=$* QUIRE_WHEEL_CXX="$(CURDIR)/$(WHEEL_TOOLS)/bin/python -m ziglang c++ \
		-target $(lastword $(subst _28_, ,$*))-linux-gnu.2.28" \
		$(WHEEL_TOOLS)/bin/python -m build --wheel --outdir dist . 2>&1 | grep --line-buffered -E "compiling ops|Success| error: "; \
		ls dist/quire-*-$*.whl

$(WHEEL_TOOLS)/.ready:
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python -m pip install --quiet build twine check-wheel-contents ziglang
	@touch $@

# The theme's own warning is about the end of MkDocs 1; the site needs no later one.
docs: venv $(SOURCE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# For all supported platforms and Python versions. The pins in constraints.txt hold.
lock: $(LOCK_TOOLS)/.ready
	$(LOCK_TOOLS)/bin/uv pip compile --quiet --universal --generate-hashes --no-annotate --python-version 3.11 \
		--all-extras --constraint constraints.txt --default-index $(INDEX) --no-emit-index-url --no-header \
		--output-file requirements.lock pyproject.toml

audit: $(LOCK_TOOLS)/.ready
	$(LOCK_TOOLS)/bin/pip-audit --requirement requirements.lock --disable-pip --require-hashes --strict

$(LOCK_TOOLS)/.ready:
	$(PYTHON) -m venv $(LOCK_TOOLS)
	$(LOCK_TOOLS)/bin/python -m pip install --quiet pip-audit uv
	@touch $@

figures: venv
	$(BIN)/python -m benchmarks.figures_page

$(SOURCE): Makefile
	@rm -rf $@ && mkdir -p $@
	@for name in $(FOLDERS) __init__.py __main__.py py.typed; do ln -s ../../../$$name $@/$$name; done

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
