# `make` alone lists the targets. Everything runs in .venv, which is made on first use.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
JOB := configs/gpt-stdlib.yaml
PLANNER := $(wildcard tests/benchmarks/*planner_*.py)
IMPORTED := tests/benchmarks/cnn_profiles.py tests/benchmarks/in_turns.py
BENCHMARKS := $(filter-out $(PLANNER) $(IMPORTED),$(wildcard tests/benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help demo test test-equality torture check bench bench-planner golden clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 18

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pipectl needs Python 3.11 or newer: make PYTHON=python3.11")'
	@echo "Installing pipectl and its dependencies into .venv (once; torch is large)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mpich,examples,test]'
	@touch $@

demo: $(INSTALLED) ## train a small GPT in a pipeline of four ranks on this machine
	$(BIN)/pipectl check $(JOB)
	$(BIN)/pipectl profile $(JOB) --scheduler local
	$(BIN)/pipectl plan $(JOB) --scheduler local
	$(BIN)/pipectl submit $(JOB) --scheduler local --wait
	@echo
	$(BIN)/pipectl status last

test: $(INSTALLED) ## run all tests
	$(BIN)/python -m pytest -n auto

test-equality: $(INSTALLED) ## compare every schedule, use of memory and number of ranks with one rank
	$(BIN)/python -m pytest -n 0 -m product tests/equality

torture: $(INSTALLED) ## kill, freeze and disturb runs in every way there is, damage files
	$(BIN)/python -m pytest -n 0 -m torture

check: $(INSTALLED) ## lint, formatting and types, as CI checks them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED) ## measure the tool itself
	@for file in $(BENCHMARKS); do echo "$$file"; $(BIN)/python "$$file" || exit 1; done

bench-planner: $(INSTALLED) ## compare the planner with others; rewrites docs/planner-benchmarks.md
	$(BIN)/python tests/benchmarks/write_planner_tables.py

golden: $(INSTALLED) ## rewrite the golden files and the generated reference; look at the diff
	PIPECTL_GOLDEN=write $(BIN)/python -m pytest $$(grep -rl --include='*.py' PIPECTL_GOLDEN tests)
	$(BIN)/python -m pipectl.spec.reference .

clean: ## remove what make and the tools made; runs/ stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
