# make help lists what there is to do.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
PARALLEL := -n auto --maxprocesses 8 --dist worksteal

.PHONY: help setup demo test test-slow test-long test-cluster test-cpus check format figures bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed  ## make .venv and install what is needed, once

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "atoll needs Python 3.11 or newer: make PYTHON=python3.11 setup"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,photos,parquet,store,text,ray,eval,federation,serve,dev]'
	touch $@

demo: setup  ## data, experts, one model, samples and a report: demo/report.html
	$(BIN)/atoll demo --out demo

test: setup  ## run the tests, on all cores
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: setup  ## run the tests that take minutes or gigabytes
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not cluster and not long"

test-long: setup  ## run the tests that take several minutes each: damaged inputs, races, kills and faults
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and long"

test-cluster: setup  ## run the tests that start a Ray cluster of several nodes on this machine
	$(BIN)/python -m pytest -m "slow and cluster"

test-cpus: setup  ## run the tests of equal bits as on CPUs with fewer instructions
	ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 \
		$(BIN)/python -m pytest $(PARALLEL) -m "bits and not slow"
	ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
		$(BIN)/python -m pytest $(PARALLEL) -m "bits and not slow"

check: setup  ## lint, formatting and types, then the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PARALLEL)

format: setup  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

figures: setup  ## draw the pictures in docs/figures anew
	$(BIN)/python docs/draw_figures.py

bench: setup  ## measure speed and memory on this machine, beside diffusers and scikit-learn
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/forward.py
	$(BIN)/python benchmarks/kmeans.py
	$(BIN)/python benchmarks/prepare.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/sample.py
	$(BIN)/python benchmarks/memory.py
	@echo "serving needs a model: $(BIN)/python benchmarks/serve.py demo/model"

clean:  ## remove .venv and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
