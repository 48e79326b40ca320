# `make demo` and `make test` set up everything they need, in .venv, with Python 3.12.
PYTHON ?= python3.12
BIN := .venv/bin

.PHONY: demo check test lint sweep docs clean
.DELETE_ON_ERROR: # no .venv that is half made

demo: .venv/.demo
	$(BIN)/python -m dsv4_jax demo

# XLA's optimizations take most of the tests' time; `make sweep` keeps them.
PYTEST = JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not sweep"

test: .venv/.test
	$(PYTEST)
	$(MAKE) --no-print-directory lint

# Two minutes: lint, types and the tests that need JAX alone.
NEEDS_MORE = bench% bridge% checkpoint compressor cutedsl% demo dlpack examples gpu% huggingface interpreter lowering readme
check: lint
	$(PYTEST) -k "not triton" $(filter-out $(NEEDS_MORE:%=tests/test_%.py),$(wildcard tests/test_*.py))

# What takes minutes more.
sweep: .venv/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m sweep

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

docs: .venv/.docs
	$(BIN)/mkdocs build

.venv/.docs: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -qq --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --upgrade pip

.venv/.demo: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -qq --editable '.[demo]'
	touch $@

# Without its dependency jax-cuda13-pjrt, the plugin lets JAX lower for NVIDIA's GPUs, no more. That one is large, and
# where CUDA's libraries are installed and no driver is, JAX 0.12.0.1 crashes with it.
.venv/.test: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -qq --editable '.[test]'
	$(BIN)/python -m pip install -qq --no-deps jax-cuda13-plugin==$$($(BIN)/python -c 'import jax; print(jax.__version__)')
	touch $@
