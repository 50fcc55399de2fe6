# Every target works on a fresh machine that has Python 3.11 or newer: the first one makes $(VENV) and installs
# the pinned versions into it; later ones find the stamp and start at once. Node.js 20 or newer is optional: with
# it the live dashboard and the JupyterLab extension are built, without it the cells still work.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
NOTEBOOK ?= 01_quickstart
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.etrain-installed
FRONT_END := $(wildcard labextension/src/* labextension/style/* labextension/schema/* \
  labextension/package.json labextension/yarn.lock labextension/tsconfig.json)
TYPED := etrain_jupyter benchmarks notebooks

# Two files at a time: most tests wait more than they compute.
ALL_TESTS = $(BIN)/python -m pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo lab test endurance lint docs screenshots bench peers constraints clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: $(INSTALLED) ## Make the virtual environment and install the package into it

$(INSTALLED): pyproject.toml hatch_build.py constraints.txt $(FRONT_END)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "etrain: this is Python %d.%d; 3.11 or newer is needed. Say which: make PYTHON=python3.12 ..." \
	  % sys.version_info[:2])'
	@echo "Installing into $(VENV) (once; a few minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,docs]"
	@touch $@

demo: $(INSTALLED) ## Run the quickstart notebook without a browser (NOTEBOOK=04_spot_cluster: a simulated EC2)
	$(BIN)/python notebooks/run.py notebooks/$(NOTEBOOK).ipynb --output .demo

lab: $(INSTALLED) ## Open JupyterLab on the notebooks (ARGS="--no-browser --port 8890" and the like)
	$(BIN)/python -m jupyterlab --ServerApp.root_dir=notebooks $(ARGS)

test: $(INSTALLED) ## Run the tests (ARGS="-k ledger" and the like); the end says what was skipped and rerun
	$(if $(ARGS),$(BIN)/python -m pytest $(ARGS),$(ALL_TESTS))

endurance: $(INSTALLED) ## The long tests of the engine: 500 schedules of faults, 1,000 re-forms, 100 kills, spot (an hour)
	ETRAIN_CHAOS_SCHEDULES=500 ETRAIN_SCHEDULES=10000 ETRAIN_SOAK=1 ETRAIN_ALL_SEEDS=1 ETRAIN_TORTURE=50 ETRAIN_SPOT=1 \
	  $(BIN)/python -m pytest -p no:rerunfailures tests/chaos tests/unit/rules -m slow $(ARGS)
	ETRAIN_SPAWN=1 $(BIN)/python -m pytest -p no:rerunfailures tests/chaos/test_faults.py tests/chaos/test_endings.py $(ARGS)

lint: $(INSTALLED) ## Style, types and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(TYPED)
	$(BIN)/python -m pytest -q tests/unit/test_architecture.py

docs: $(INSTALLED) ## Build the documentation into build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet $(ARGS)

screenshots: $(INSTALLED) ## Retake the pictures of the documentation, in headless Chromium
	mkdir -p .demo/shots
	ETRAIN_SHOTS=$(CURDIR)/.demo/shots $(BIN)/python -m pytest $(addprefix tests/browser/test_, \
	  training.py side_panel.py completion.py)
	cd .demo/shots && cp dashboard.png side-panel.png completion.png $(CURDIR)/docs/images/

bench: $(INSTALLED) ## Measure against the peers; tables on the screen, JSON in .demo/ (ARGS="--quick")
	$(BIN)/python -m benchmarks all --json .demo/benchmarks.json $(ARGS)

peers: $(INSTALLED) ## Install Ray Train and torchft, which bench measures beside ours where they are there
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"

constraints: $(INSTALLED) ## Pin in constraints.txt what is installed now
	$(BIN)/python -m pip freeze --disable-pip-version-check --exclude-editable \
	  | sed -e '/@/d' -e 's/+cpu$$//' > constraints.txt

clean: ## Remove what was built or measured here; keep the virtual environment and your runs
	rm -rf .demo build dist labextension/lib etrain_jupyter/labextension etrain_jupyter/static \
	  .mypy_cache .ruff_cache .pytest_cache .hypothesis $(INSTALLED)
	find etrain_jupyter tests benchmarks notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
