# Everything runs from .venv in this folder; `make setup` makes it and does nothing when it is up to date.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test soak lint bench chaos clean

BIN := .venv/bin
STAMP := .venv/.hicache-ray-installed
# The first of these that is Python 3.10 or newer makes the environment; choose another with `make setup PYTHON=/path/to/python`.
PYTHON ?=
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10 python)

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install the package with its dependencies

$(STAMP): pyproject.toml constraints.txt
	@found=""; \
	for candidate in $(CANDIDATES); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "hicache-ray needs Python 3.10 or newer and none of these is: $(CANDIDATES)." \
	         "Install one, or name it: make setup PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	fi; \
	if [ ! -x $(BIN)/python ]; then \
	    echo "setup: making .venv with $$("$$found" --version)"; \
	    if ! "$$found" -m venv .venv; then \
	        rm -rf .venv; \
	        echo "$$found cannot make a virtual environment; install its venv module (Debian, Ubuntu: apt-get install python3-venv)." >&2; \
	        exit 1; \
	    fi; \
	fi
	@echo "setup: installing hicache-ray and its dependencies (several minutes the first time: torch and Ray are large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "setup: done"

demo: setup ## serve a small hybrid model on a local Ray, run the probe under both write policies, print one table
	@$(BIN)/hicache-ray demo

test: lint ## lint, then all tests: those on Ray, which mostly wait, beside the others
	@mkdir -p .pytest_cache; \
	$(BIN)/python -m pytest tests/actors tests/verify > .pytest_cache/ray.log 2>&1 & ray=$$!; \
	status=0; $(BIN)/python -m pytest tests --ignore=tests/actors --ignore=tests/verify || status=$$?; \
	wait $$ray || status=$$?; cat .pytest_cache/ray.log; exit $$status

# A history that fails is named by the line that lives it again: hicache-ray sim --seed N --steps M --case NAME.
MINUTES ?= 1440
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')

soak: setup ## simulate cache groups, random seeds under faults, until stopped or for MINUTES=n (SEED=n: from there)
	@$(BIN)/hicache-ray sim --seed $(SEED) --steps 20000 --case mixed --minutes $(MINUTES)

lint: setup ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/mypy -p hicache_ray

bench: setup ## run the benchmarks, print a table, write benchmarks/results.json
	@$(BIN)/python -m benchmarks

chaos: setup ## kill, freeze and cut off the parts of a running tier of three nodes; print what that cost (needs root)
	@status=0; $(BIN)/python -m pytest -m chaos tests/actors/test_chaos.py || status=$$?; \
	$(BIN)/python -m tests.chaos || status=$$?; exit $$status

clean: ## remove caches and build products (not .venv)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/results.json
	@find . -name __pycache__ -not -path './.venv/*' -type d -prune -exec rm -rf {} +
