# `make help` lists the verbs. Minutes: `test`, `bench`, the first `test-cuda`; hours: `soak`.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test test-cuda lint bench soak clean

VENV := .venv
BIN := $(VENV)/bin
CUDA_VENV := .venv-cuda
# Byte code is written when a module is first imported, which is most of the packages' modules never.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --no-input -q install --no-compile
PYTEST := $(BIN)/python -m pytest -q

CANDIDATES := $(strip $(PYTHON) python3 python3.12 python3.11)
# The candidates are asked rather than looked for: a shim of that name need not start anything.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))

help: ## list the verbs (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.installed-run ## run 2A2F in the model: table, figure, trace and CSV in out/
	@mkdir -p out
	$(BIN)/afdep run 2A2F --hidden 2048 --tokens 1,8,32,128,512,2048 \
		--plot out/2A2F.svg --trace out/2A2F.json --csv out/2A2F.csv

test: $(VENV)/.installed-dev ## run the tests, without soak and bench
	$(PYTEST) -n 2

test-cuda: $(CUDA_VENV)/.installed ## compile every kernel for sm_90, no GPU needed; minutes the first time, then cached
	$(CUDA_VENV)/bin/python -m pytest -q -rs -n 2 tests/cuda

lint: $(VENV)/.installed-dev ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-dev ## time the model; AGAINST=DIR compares it with another checkout
	$(BIN)/python experiments/bench.py $(if $(AGAINST),--against "$(AGAINST)")

soak: $(VENV)/.installed-dev ## run the long random tests
	$(PYTEST) -m soak

clean: ## remove out/, build products and caches; the virtual environment stays
	rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find afdep_sim tests experiments -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- installation: once per change of pyproject.toml ----------------------------------------------------------------

$(BIN)/python $(CUDA_VENV)/bin/python:
	@for python in $(CANDIDATES); do \
		if $$python -c '$(SUPPORTED)' 2>/dev/null; then \
			echo "creating $(@D:/bin=) with $$python"; \
			exec $$python -m venv $(@D:/bin=); \
		fi; \
	done; \
	echo "afdep_sim needs Python 3.11 or 3.12 and found neither (tried $(CANDIDATES)); name one with PYTHON=..." >&2; \
	exit 1

$(VENV)/.installed-run: pyproject.toml | $(BIN)/python
	$(INSTALL) -e '.[plots]'
	@touch $@

# The dev set holds the plots, so it also does for `make run`.
$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed-run

$(CUDA_VENV)/.installed: pyproject.toml | $(CUDA_VENV)/bin/python
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check --no-input -q install --no-compile -e '.[compile]' \
		'pytest>=8' 'pytest-xdist>=3.5'
	@touch $@
