# make install     set up .venv with the newest usable Python
# make demo        prepare text, train a small model, evaluate it, sample from it: runs/demo/
# make test        formatter, linter, tests
# make test-all    the same on the oldest and the newest supported Python and JAX
# make kernels     the fused kernels, every shape in the interpreter: slow
# make compile-all     the steps of docs/scaling.md for TPU pods, without the pods: hours; then the table
# make lint, format, benchmarks, clean
#
# make install EXTRAS=dev,cuda     with CUDA; EXTRAS=dev,tpu on a TPU VM
# make install PYTHON=/usr/bin/python3.12     with that Python (also PYTHON_OLDEST, for test-all)

EXTRAS ?= dev
PYTHON ?=
PYTHON_OLDEST ?=
OLDEST_JAX := jax==0.10.2
NEWEST_JAX := jax==0.12.*
# A worker a core; a file's tests stay together, since they share what is slow to make
PYTEST := pytest -n auto --dist loadfile

.PHONY: install demo test test-all kernels compile-all lint format benchmarks clean

install: .venv/installed

demo: install
	.venv/bin/python -m cem_jax demo

test: lint
	.venv/bin/python -m $(PYTEST)

test-all: lint .venv-oldest/installed .venv-newest/installed
	.venv-oldest/bin/python -m $(PYTEST)
	.venv-newest/bin/python -m $(PYTEST)

kernels: install
	.venv/bin/python -m $(PYTEST) -m slow tests/kernels

compile-all: install
	.venv/bin/python benchmarks/scaling.py
	.venv/bin/python benchmarks/scaling.py --table

lint: install
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

format: install
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

benchmarks: install
	.venv/bin/python benchmarks/run.py

clean:
	rm -rf .venv .venv-oldest .venv-newest build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: pyproject.toml tools/install.sh
	tools/install.sh .venv "$(or $(PYTHON),newest)" "$(EXTRAS)"

.venv-oldest/installed: pyproject.toml tools/install.sh
	tools/install.sh .venv-oldest "$(or $(PYTHON_OLDEST),oldest)" dev "$(OLDEST_JAX)"

.venv-newest/installed: pyproject.toml tools/install.sh
	tools/install.sh .venv-newest "$(or $(PYTHON),newest)" dev "$(NEWEST_JAX)"
