PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help setup run tour docs lint test test-all bench report clean

help: ## print this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install DarKnight with its development tools

# torch goes first and alone: it is by far the largest, and everything else is resolved around it.
# The build runs without isolation, on the setuptools pinned in constraints.txt, so nothing is fetched twice or unpinned.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/darknight/kernels/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, and $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@echo "Setting up $(VENV), once: some gigabytes, and some minutes without a word. PyTorch first."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt setuptools
	@echo "PyTorch is there. Now the rest, which takes longer."
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev,demo,docs,ray]'
	@touch $@

run: $(STAMP) ## train a small network on scikit-learn's digits, privately and in the clear
	$(BIN)/darknight train --output darknight-demo
	@echo "Attack it yourself, in a minute: $(BIN)/darknight audit --quick --output darknight-demo (darknight-demo/audit.html)"

tour: $(STAMP) ## seal data, submit a job to an enclave (simulated), kill it half way, fetch the model
	$(BIN)/python scripts/tour.py darknight-tour

docs: $(STAMP) ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "Open site/index.html, or with its search: $(BIN)/python -m http.server --directory site"

lint: $(STAMP) ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## lint, then every kind of test at a reduced count, on two cores
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-all: lint ## lint, then every test at its full count, on two cores, with a summary table
	$(BIN)/pytest --full --numprocesses 2 --dist loadfile --no-loadscope-reorder

bench: $(STAMP) ## run every benchmark in benchmarks/
	@set -e; for script in $(filter-out %/timing.py,$(sort $(wildcard benchmarks/*.py))); do echo "== $$script"; $(BIN)/python $$script; done

report: $(STAMP) ## draw the results in results/ beside what the paper claims: darknight-report/results.html
	$(BIN)/darknight report results --output darknight-report

clean: ## remove .venv and everything that tools leave behind
	rm -rf $(VENV) .cache site build dist src/darknight/kernels/*.so darknight-demo darknight-audit darknight-tour darknight-report .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks experiments -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
