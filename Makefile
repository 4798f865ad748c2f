# `make` alone lists the targets. Everything runs in .venv, which is made on first use.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
MEASURED := .venv/measured
JOB := configs/gpt-large.yaml
WITH_RANKS := tests/configs
IMPURE := pipectl/capture/*,pipectl/profiler/*,pipectl/runtime/*,pipectl/jobs/*,pipectl/cli/*
TORCH ?= 2.15
QUICK := tests/test_*.py $(addprefix tests/,batch docs planner report runs schedule simulate spec)

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-equality test-lowest test-torch coverage test-gpu torture check docs dist bench mutants golden clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 18

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "pipectl needs Python 3.10 or newer: make PYTHON=python3.10")'
	@echo "Installing pipectl and its dependencies into .venv (once; torch is large)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[mpich,examples,test]'
	@$(BIN)/python -m compileall -q -j 0 $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') >/dev/null || true # pip compiles on one core
	@touch $@

$(MEASURED): $(INSTALLED)
	@echo "Installing the models that are measured (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mpich,examples,test,corpus]'
	@touch $@

demo: $(INSTALLED) ## train a GPT that is too large for one rank, on two of this machine
	$(BIN)/pipectl check $(JOB)
	$(BIN)/pipectl profile $(JOB) --scheduler local
	$(BIN)/pipectl plan $(JOB) --scheduler local
	$(BIN)/pipectl submit $(JOB) --scheduler local --wait
	@echo
	$(BIN)/pipectl status last

quick: $(INSTALLED) ## run short tests that start no ranks and capture no model; a minute of processor time
	$(BIN)/python -m pytest -n auto -m 'not mpi and not slurm and not slow and not corpus and not product and not torture' $(QUICK)

test: $(INSTALLED) ## run all tests
	$(BIN)/python -m pytest -n auto

test-equality: $(INSTALLED) ## compare every schedule, use of memory and number of ranks with one rank
	$(BIN)/python -m pytest -m '' tests/equality tests/accelerator
	$(BIN)/python -m pytest -m product --ignore=tests/equality --ignore=tests/accelerator

test-lowest: ## run the tests that start no ranks, and some that do, with the lowest versions allowed
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e '.[mpich,examples,test]'
	.venv-lowest/bin/python -m pytest -n auto -m 'not mpi and not slurm and not corpus and not product and not torture'
	.venv-lowest/bin/python -m pytest $(WITH_RANKS)

test-torch: ## run tests of torch_api, the commands, capture and ranks with a release of torch (TORCH=2.8 PYTHON=python3.10)
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check 'torch==$(TORCH).*' -e '.[mpich,examples,test]'
	.venv-torch/bin/python -m pytest -n auto tests/test_torch_api.py tests/cli tests/capture tests/equality tests/profiler tests/runtime $(WITH_RANKS)

coverage: $(INSTALLED) ## run all tests and say which share of the branches they took; an hour
	$(BIN)/python -m pytest -n auto --cov --cov-report=
	$(BIN)/coverage report --skip-covered --fail-under=98 --omit=$(IMPURE)
	$(BIN)/coverage report --skip-covered --fail-under=95 --include=$(IMPURE)

test-gpu: ## check what only a GPU can show, in ten minutes, on a machine that has one (tests/gpu/run.sh)
	tests/gpu/run.sh

torture: $(INSTALLED) ## kill, freeze and disturb runs in every way there is, damage files
	$(BIN)/python -m pytest -m torture

check: $(INSTALLED) ## lint, formatting and types, as CI checks them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED) ## build the pages as a site in build/site; a broken link is an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/zensical build --clean --strict

dist: $(INSTALLED) ## build the wheel, the source distribution and man pages in dist/, and check them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	rm -rf dist build/man
	$(BIN)/python tests/docs/man_pages.py build/man
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

bench: $(MEASURED) ## measure the tool, its planner and its peers; rewrites docs/benchmarks.md (ONLY="peer memory": those)
	$(BIN)/python tests/benchmarks/write_page.py $(ONLY)

mutants: $(INSTALLED) ## say which of a list of deliberate faults the tests catch; ten minutes
	$(BIN)/python tests/benchmarks/mutants.py

golden: $(INSTALLED) ## rewrite the golden files and the generated reference; look at the diff
	PIPECTL_GOLDEN=write $(BIN)/python -m pytest $$(grep -rlE --include='test_*.py' '\b(golden|snapshot|check_table)\(' tests)

clean: ## remove what make and the tools made; runs/ stays
	rm -rf .venv .venv-lowest .venv-torch .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
