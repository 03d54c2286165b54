# Sets everything up on a fresh machine (Python 3.11+, make, a C compiler, a package index) and runs it.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
INSTALLED := $(VENV)/.dflash-sglang

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: setup test lint unit demo clean

setup: $(INSTALLED)

test: lint unit

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q tests/kernels

demo: $(INSTALLED)
	$(BIN)/dflash-sglang demo

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

# The dependencies as wheels only, then the project itself, editable. Bytecode is compiled once, here: every server
# is several processes that import SGLang, twice as fast with it.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --only-binary :all: --compile-bytecode --requirement pyproject.toml --extra test
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $@
