# Every target that runs something builds the environment first, so on a fresh clone each one is the only command.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# One thread a process: eight workers share two cores in the tests.
export OMP_NUM_THREADS ?= 1

.PHONY: env test test-all parity exhaustive demo gpu lint clean

env: $(STAMP)

# torch comes first and pinned: a later `pip install` must find a CPU build present instead of choosing its own.
$(STAMP): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet --editable ".[test]"
	touch $@

test: env
	$(PY) -m pytest -m "not slow and not parity and not exhaustive and not gpu"

test-all: env
	$(PY) -m pytest -m "not gpu"

parity: env
	$(PY) -m pytest -m parity

exhaustive: env
	$(PY) -m pytest -m exhaustive

demo: env
	$(PY) examples/train_gpt.py --demo

# Runs with the interpreter it is given (PYTHON=...), which must have torch, lightning and pytest; skips without a device.
gpu:
	@$(PYTHON) -c "import torch, lightning, pytest" || \
	  { echo "PYTHON=$(PYTHON) lacks torch, lightning or pytest: name another, e.g. make gpu PYTHON=$(PY)"; exit 1; }
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu tests/gpu

lint: env
	$(PY) -m ruff check lightning_ntp tests examples

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache
