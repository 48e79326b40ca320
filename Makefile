# `make demo` and `make test` set up everything they need, in .venv, with Python 3.12.
PYTHON ?= python3.12
BIN := .venv/bin

.PHONY: demo test lint docs clean
.DELETE_ON_ERROR: # no .venv that is half made

demo: .venv/.demo
	$(BIN)/python -m dsv4_jax demo

test: .venv/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal
	$(MAKE) --no-print-directory lint

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

.venv/.%: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -qq --editable '.[$*]'
	touch $@
