# Every target that runs something builds the environment first, so on a fresh clone each one is the only command.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# One thread a process: eight workers share two cores in the tests.
export OMP_NUM_THREADS ?= 1

.PHONY: env test test-all parity exhaustive chaos chaos-table soak bench demo gpu lint clean

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

# Seeded plans of faults on the Trainer; the last line is JSON. One run alone: make chaos N=1 SEED=17
N ?= 50
SEED ?= 0
chaos: env
	$(PY) -m tests.chaos --runs $(N) --seed $(SEED)

# Every phase of a step x every kind of victim.
chaos-table: env
	$(PY) -m pytest -m exhaustive tests/chaos tests/lightning

# 50 recoveries in one run: threads, files and memory stay flat.
soak: env
	$(PY) -m pytest -m slow tests/lightning/test_soak.py

# What it costs to be able to survive, in ratio to the demo's step; the last line is JSON.
bench: env
	PYTHONPATH=.:examples $(PY) benchmarks/surviving.py

demo: env
	$(PY) examples/train_gpt.py --demo

# Runs with the interpreter it is given (PYTHON=...), which must have torch, lightning and pytest; skips without a device.
gpu:
	@$(PYTHON) -c "import torch, lightning, pytest" || \
	  { echo "PYTHON=$(PYTHON) lacks torch, lightning or pytest: name another, e.g. make gpu PYTHON=$(PY)"; exit 1; }
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu tests/gpu

lint: env
	$(PY) -m ruff check lightning_ntp tests examples benchmarks

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache
