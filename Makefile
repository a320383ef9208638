# make train: set up and train a small GPT on 8 devices. make test: set up and check everything. See README.md.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
EXTRAS ?= test
JOBS ?= 2
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed-$(EXTRAS)
# glibc would give memory back after each compilation and take it anew for the next, page by page: an eighth of the time.
KEPT := MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=67108864 MALLOC_MMAP_THRESHOLD_=33554432
# Where a machine tells Python to write no bytecode, each process that tests start would compile all of JAX and Flax: two
# seconds each. It is written beside the environment, and nowhere into the source.
KEPT += PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(abspath $(VENV))/bytecode
# A file's tests stay together, since they share compiled programs. One worker more than cores: a tenth of the time, tests
# wait for processes that they have started.
PYTEST := $(KEPT) $(PYTHON) -m pytest -n $$(( $(JOBS) + 1 )) --dist loadfile

.PHONY: help setup train lint docs test tests test-all test-aot test-gpu test-strangers search

help:
	@echo "make train | test | test-all | test-aot | test-gpu | test-strangers | search | docs | lint | setup (EXTRAS=test,gpu for NVIDIA GPUs)"

setup: $(STAMP)

# Of a hundred packages a tenth is ever imported: Python compiles that when it is, instead of all of it at once here.
# A name on PATH may be a shim for a Python that is not there, so each candidate is run before it is believed.
$(STAMP): pyproject.toml
	@if [ ! -x $(PYTHON) ]; then \
	  for name in python3.13 python3.12 python3.11 python3; do \
	    if $$name -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$name; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then echo "cjax needs Python 3.11 or later with its venv module; none found as python3.13, python3.12, python3.11 or python3" >&2; exit 1; fi; \
	  $$found -m venv $(VENV); \
	fi
	$(PYTHON) -m pip install --quiet --no-compile --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $(STAMP)

train: setup
	$(VENV)/bin/cjax train

lint: setup
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

# The site, in build/site. Material's word about MkDocs 2, which is not asked for, is no warning of ours.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

# Lint takes one core for a minute; it is done long before the tests are.
test: setup
	@$(MAKE) --no-print-directory --jobs 2 lint tests

tests: setup
	$(PYTEST)

# The full product of all tables, part by part: goes on where it was stopped; the log is kept with the code.
test-all: lint
	$(KEPT) $(PYTHON) tests/parts.py --jobs $(JOBS)

test-aot:
	@$(MAKE) --no-print-directory setup EXTRAS=test,aot
	$(PYTEST) -m aot

# One process: two would share one GPU's memory.
test-gpu:
	@$(MAKE) --no-print-directory setup EXTRAS=test,gpu
	CJAX_TEST_GPU=1 $(PYTHON) -m pytest -m gpu

# In an environment of its own, since transformers and others pin what cjax does not. RUN takes options, such as
# RUN='--models bert,vit --plans 2,7 --again'; what was run with this cjax before is not run again.
STRANGERS := .venv-strangers
ASKED := tests/strangers/requirements.txt tests/strangers/requirements-alone.txt
RUN ?= --table --jobs $(JOBS)
test-strangers: $(STRANGERS)/.installed
	PYTHONPATH=.:tests $(STRANGERS)/bin/python -m strangers.run $(RUN)

$(STRANGERS)/.installed: pyproject.toml $(ASKED)
	@$(MAKE) --no-print-directory setup VENV=$(STRANGERS)
	$(STRANGERS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/strangers/requirements.txt
	$(STRANGERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/strangers/requirements-alone.txt
	@touch $@

# Random models under random plans, from where the last log in docs/results stopped; what fails becomes a row of
# tests/search/kept.json, which `make test` runs.
PAIRS ?= 500
search: setup
	$(PYTHON) tests/search/run.py --pairs $(PAIRS) --jobs $(JOBS)
