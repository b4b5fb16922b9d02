# `make demo` and `make test` set everything up from nothing. PYTHON chooses the interpreter for the virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
SEED ?= 1090
LIBRARY := src/kdakit/backends/cuda/libkdakit.so
# Several processes where PYTHON has pytest-xdist; tests that share a build stay together.
SPREAD = $(shell $(PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses=$(WORKERS) --dist=loadgroup)
# One thread per test process: more would fight for the same cores. Bytecode is kept: a hundred processes import the same files.
ONE_THREAD := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help venv dist demo test test-full test-gpu gpu-cases gpu-random gpu-tests lint docs tables cuda test-cuda clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## virtual environment in .venv with pinned versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kdakit needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,jax,torch,models,flax,bench,docs]'
	@touch $@

demo: $(STAMP)  ## what runs here, is it right, and a model that learns to remember: under three minutes
	$(BIN)/kdakit demo

test: $(STAMP)  ## the whole test suite; make test ARGS='-k name' for a part of it
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 $(ARGS)

test-full: $(STAMP)  ## everything, also what CI leaves out: whole products of cases and dtypes, every tile size for every GPU; over an hour
	$(ONE_THREAD) KDAKIT_FULL=1 KDAKIT_EVERY_TILE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-gpu: gpu-cases gpu-random gpu-tests $(if $(shell command -v nvcc),test-cuda)  ## on a machine with a GPU, with PYTHON's own torch, triton and pytest: every case and 324 random problems against float64, the contract, what only a GPU shows, and with nvcc test-cuda; -j3 WORKERS=6 is faster

gpu-cases:  ## every case, dtype and operation of the Triton kernels against float64, in WORKERS processes
	KDAKIT_UNCHECKED=1 PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m kdakit.cli.main verify --backend triton_gpu --large --workers $(WORKERS) $(ARGS)
	KDAKIT_UNCHECKED=1 PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m kdakit.cli.main verify --backend triton_gpu --large --workers $(WORKERS) --op recurrent --no-grad $(ARGS)

gpu-random:  ## random problems on the Triton kernels; SEED=n for others
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m kdakit.cli.main verify --backend triton_gpu --random 324 --seed $(SEED) --workers $(WORKERS)

gpu-tests:
	$(ONE_THREAD) KDAKIT_UNCHECKED=1 PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest -q $(SPREAD) tests/test_contract.py tests/stages/test_triton_gpu.py \
		tests/stages/test_fused_gpu.py tests/serving/test_pool_gpu.py tests/serving/test_pending.py tests/serving/test_pages.py tests/test_padding.py tests/stacks/test_engines.py \
		-k 'triton_gpu or fused_gpu or pool_gpu or pending or real_sizes or engines' $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

docs: $(STAMP)  ## the site, into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

tables: $(STAMP)  ## rewrite the generated tables of README.md and docs/, and the pictures of records
	$(BIN)/kdakit doctor --table docs/backends.md docs/adding-a-backend.md
	$(BIN)/kdakit verify --dtype float32 bfloat16 --table docs/numerics.md
	$(BIN)/kdakit bench --render $(sort $(wildcard benchmarks/results/*.json)) --table docs/performance.md --section cpu
	$(BIN)/kdakit bench --render $(sort $(wildcard benchmarks/results/ranks/*.json)) --table docs/distributed.md --section ranks
	$(BIN)/kdakit bench --render $(sort $(wildcard benchmarks/results/gpu/suite/*.json)) --table docs/performance.md --section gpu
	$(BIN)/kdakit bench --render $(sort $(wildcard benchmarks/results/gpu/suite/*.json)) --table README.md --section speed
	$(if $(wildcard benchmarks/results/gpu/whole/*.json),$(BIN)/kdakit bench --render $(sort $(wildcard benchmarks/results/gpu/whole/*.json)) --table docs/train-and-serve.md --section whole)
	$(BIN)/kdakit bench --render $(sort $(wildcard benchmarks/results/gpu/first_calls/*.json)) --table docs/performance.md --section first_calls
	$(BIN)/kdakit bench --render $(sort $(wildcard benchmarks/results/gpu/pool/*_pool.json)) --table docs/serving.md --section pool
	$(BIN)/kdakit bench --render $(sort $(wildcard benchmarks/results/gpu/pool/*_state_bits.json)) --table docs/serving.md --section state_bits
	$(BIN)/kdakit bench --render $(sort $(wildcard benchmarks/results/gpu/suite/*_suite.json)) --plot docs/h200.png
	$(BIN)/kdakit bench --render $(lastword $(sort $(wildcard benchmarks/results/*_cpu_x86.json))) --plot docs/cpu.png
	$(BIN)/kdakit compile --render $(sort $(wildcard benchmarks/results/tpu/*.json)) --table docs/tpu.md

cuda: $(STAMP)  ## the CUDA library, beside its backend; ARCH='90a' for one kind of GPU only (needs nvcc)
	$(BIN)/python -m kdakit.backends.cuda.build $(if $(ARCH),--arch $(ARCH))

$(LIBRARY): $(wildcard csrc/*.c* csrc/include/* csrc/prefill/* csrc/backward/*) src/kdakit/backends/cuda/build.py
	PYTHONPATH=src $(PYTHON) -m kdakit.backends.cuda.build --jobs $(WORKERS) $(if $(ARCH),--arch $(ARCH))

test-cuda: $(LIBRARY)  ## on a machine with a GPU, with PYTHON's own torch: the CUDA library, built if it is not, the contract, compute-sanitizer, the C program
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(ONE_THREAD) PYTHONPATH=src:$(PYTHONPATH) $(PYTHON) -m pytest -q $(SPREAD) -k 'cuda or hopper or records or blocks' \
		tests/stages/test_cuda_native.py tests/stages/test_cuda_gpu.py tests/stages/test_hopper_gpu.py tests/stages/test_records_gpu.py tests/stages/test_blocks_gpu.py \
		tests/test_contract.py $(ARGS)

dist: $(STAMP)  ## sdist and wheel into dist/, README with addresses: make dist REPOSITORY=https://github.com/OWNER/kdakit
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python .ci/release.py $(REPOSITORY)

clean:  ## remove everything that make has made
	rm -rf $(VENV) site out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
