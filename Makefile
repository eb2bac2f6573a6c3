# `make demo` shows the package at work, `make test` passes its tests; both make their own .venv first.

PYTHON ?= python3
VENV ?= .venv
STAMP = $(VENV)/.requirements-dev
IN_VENV = $(VENV)/bin/python

.PHONY: help demo test lint build gpu-test bench sweep proof fuzz mutate accuracy portability kit clean
.DEFAULT_GOAL = help

help: ## List what can be made.
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

demo: export LOCAL_KERNELS ?= org/portable-kernels=$(CURDIR)/build
demo: build ## Load the package and hold every op, then a sentence-embedding model and a small Llama, against PyTorch.
	$(IN_VENV) examples/quickstart.py
	$(IN_VENV) examples/minilm.py
	$(IN_VENV) examples/llama.py

# Tests that launch nothing: once is enough.
WITHOUT_KERNELS = test_benchmarks.py test_build.py test_loading.py test_portability.py test_lint_kernel.py

test: lint ## Run every test twice on the CPU: PyTorch's path, then the kernels in Triton's interpreter.
	CUDA_VISIBLE_DEVICES= $(IN_VENV) -m pytest -n 2 --dist loadfile
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(IN_VENV) -m pytest -n 2 --dist loadfile $(WITHOUT_KERNELS:%=--ignore=tests/%)

lint: $(STAMP) ## Check the style with ruff.
	$(IN_VENV) -m ruff check

build: $(STAMP) ## Make build/torch-<backend>/ for every backend, and check it as kernel-builder would.
	$(IN_VENV) tools/build_local.py

gpu-test: ## Run every test on the GPU, with the python3 that is there.
	$(PYTHON) -m pytest

# The command `kernels` imports sigstore at its start, for signatures alone; a machine that has none can still measure.
BENCHMARK = import sys; from unittest.mock import Mock; sys.modules['kernels.verify'] = Mock(); \
	from kernels.cli import main; main()

bench: ## Check and time every op against PyTorch, with the python3 that is there.
	$(PYTHON) tools/build_local.py
	$(PYTHON) -c "$(BENCHMARK)" benchmark .

sweep: ## Measure every op and whole models on an H200 beside PyTorch and peers, into benchmarks/results/ and docs/.
	$(PYTHON) tools/build_local.py
	$(PYTHON) benchmarks/sweep.py build/torch-cuda --host --first --json benchmarks/results/nvidia_h200_sweep.json
	$(PYTHON) benchmarks/end_to_end.py --json benchmarks/results/nvidia_h200_end_to_end.json
	$(PYTHON) benchmarks/memory_linear_cross_entropy.py build/torch-cuda --json benchmarks/results/nvidia_h200_memory.json
	$(PYTHON) benchmarks/report.py

proof: $(STAMP) ## Do to every op all that a user can, on the CPU and in the interpreter: twenty minutes.
	CUDA_VISIBLE_DEVICES= PROOF=1 $(IN_VENV) -m pytest -n 2 tests/test_every_op.py
	CUDA_VISIBLE_DEVICES= PROOF=1 TRITON_INTERPRET=1 $(IN_VENV) -m pytest -n 2 tests/test_every_op.py

FUZZ ?= 2000

fuzz: $(STAMP) ## Draw FUZZ calls of any op, dtype, layouts and options, other ones each time.
	CUDA_VISIBLE_DEVICES= FUZZ=$(FUZZ) $(IN_VENV) -m pytest tests/test_fuzz.py
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 FUZZ=$(FUZZ) $(IN_VENV) -m pytest tests/test_fuzz.py -k options

mutate: $(STAMP) ## Break kernels on purpose, one place at a time, and see that a test notices: half an hour.
	$(IN_VENV) tools/mutate.py

accuracy: $(STAMP) ## Measure errors against float64 beside PyTorch's, into docs/accuracy.md.
	CUDA_VISIBLE_DEVICES= $(IN_VENV) tools/accuracy.py
	TRITON_INTERPRET=1 $(IN_VENV) tools/accuracy.py

portability: $(STAMP) ## Compile every kernel for twelve GPUs that need not be there, into docs/portability.md: half an hour.
	$(IN_VENV) tools/portability.py

kit: $(STAMP) ## Make an op and a kernel repository of every kind, and run the tests that they come with.
	PORTABLE_KERNELS_KIT=all CUDA_VISIBLE_DEVICES= $(IN_VENV) -m pytest -n 2 tests/test_kit.py
	PORTABLE_KERNELS_KIT=all CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(IN_VENV) -m pytest -n 2 tests/test_kit.py

clean: ## Remove what make has made.
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis

$(STAMP): requirements-dev.txt
	@$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed' if sys.version_info < (3, 11) else 0)"
	@echo "Installing the development requirements into $(VENV): PyTorch is large, so the first time takes minutes."
	$(PYTHON) -m venv $(VENV)
	$(IN_VENV) -m pip install --quiet --requirement requirements-dev.txt
	@touch $@
