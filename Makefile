# The verbs of this project. A fresh machine needs Python 3.11 or newer and PyPI; `make demo` and `make test` do the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
# Two files at a time: most tests wait for a process that they started. In the order of their names, or a long file of
# few tests would come last, and alone.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help install demo lab test test-slow test-again test-browser extension check rows bench soak clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## create $(VENV) and install llmkernel with what its tests need
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: install  ## fetch the default model, run the quickstart notebook headless, print its answers as they stream
	$(BIN)/python -m notebooks.run notebooks/quickstart.ipynb

lab: install  ## open the notebooks in JupyterLab
	$(BIN)/python -m pip install --quiet --constraint constraints.txt jupyterlab
	$(BIN)/jupyter lab --notebook-dir notebooks quickstart.ipynb

test: install  ## every test but the slow ones, the long sweeps and the browser's
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not soak and not browser"

test-slow: install  ## tests that take a minute
	$(PYTEST) $(SIDE_BY_SIDE) -m "slow and not soak and not browser"

STREAM := llmkernel/notebook/static/stream.js
$(STREAM): $(shell find extension/src -type f) extension/build.mjs extension/package-lock.json
	if command -v npm >/dev/null; then cd extension && npm ci --no-audit --no-fund && npm run build; else test -f $@; fi

extension: $(STREAM)  ## build the browser half, check its types, run its tests (needs npm)
	cd extension && npm run check && npm test

test-again: install  ## what failed last, alone
	$(PYTEST) --last-failed --last-failed-no-failures none -m "not soak"

test-browser: install $(STREAM)  ## the views in a real JupyterLab and Notebook 7; needs Chromium (apt-get install chromium)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(PYTEST) tests/browser -m "not soak"

check: install  ## format, lint, types, direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy llmkernel
	$(BIN)/lint-imports

rows: install  ## which rows of the specification are proved, by which tests
	$(BIN)/python -m tests.rows

bench: install  ## the figures of the README, as JSON on stdout
	$(BIN)/python -m benchmarks

soak: install  ## the long sweeps
	$(PYTEST) -m soak

clean:  ## remove what the verbs above made
	rm -rf $(VENV) dist build .pytest_cache .hypothesis .mypy_cache .ruff_cache
