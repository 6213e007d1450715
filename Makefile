# `make demo` and `make test` set up all they need; only python3 and make must be there.
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=# e.g. https://download.pytorch.org/whl/cpu: far less to download, no GPU
BIN := $(VENV)/bin
# The versions that tests are run with, if they are known for this Python; CONSTRAINTS= takes the newest.
VERSION := $(shell $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CONSTRAINTS ?= $(wildcard constraints/python$(VERSION).txt)
# By the environment they hold for what builds the package, too; newer pips ask for the second name.
# Not --quiet, which hides the progress of downloads of gigabytes. Without --no-compile pip compiles
# all modules of all packages, most of which nobody imports; Python compiles those that it does.
PINS = $(if $(CONSTRAINTS),PIP_CONSTRAINT=$(abspath $(CONSTRAINTS)) PIP_BUILD_CONSTRAINT=$(abspath $(CONSTRAINTS)))
PIP = $(PINS) $(BIN)/python -m pip install --no-compile $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Where this is set, as in many container images, each process that the tests start compiles all of
# torch anew, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all tests lint style types docs tutorial bench models schema gpu mutants clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

# One thread for each of as many processes as there are cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Types are checked beside the tests: mypy alone would leave all cores but one idle for minutes.
test: style
	$(MAKE) --jobs=2 types tests

# What is marked slow, too, and all cases of it: compilers, a browser, every model of the zoo.
test-all: $(VENV)/.whole lint
	$(PYTEST) --whole

tests: $(VENV)/.dev
	$(PYTEST)

lint: style types

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# The site, into site/. Every link and anchor must hold.
docs: $(VENV)/.whole
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# docs/tutorial.ipynb with the outputs of its code as it is.
tutorial: $(VENV)/.whole
	$(BIN)/jupyter execute --inplace docs/tutorial.ipynb

# With pip install ".[peers]" in the environment, peers.py times them too.
bench: $(VENV)/.whole
	for name in host launches monitor peers rows layers; do $(BIN)/python tests/benchmarks/$$name.py || exit; done

# docs/models.md: how much of which models is measured, as what, at what cost.
models: $(VENV)/.whole
	mkdir -p docs
	$(BIN)/python tests/benchmarks/covered.py --write docs/models.md

# docs/report-schema.md, from the data classes of a report; what docs/findings say, for the page.
schema: $(VENV)/.dev
	$(BIN)/python tests/report_schema.py
	$(BIN)/python tests/finding_texts.py

# Which changes of the core does no test notice? A sample; FILE=: every change of one file.
mutants: $(VENV)/.mutants
	$(BIN)/python tests/mutants.py $(or $(FILE),--sample 200)

$(VENV)/.demo: EXTRAS = lightning,tensorboard,audit,examples
$(VENV)/.dev: EXTRAS = dev
$(VENV)/.whole: EXTRAS = whole
$(VENV)/.mutants: EXTRAS = dev,mutants

# All that is to be measured on a GPU, with the Python that is there (of .venv, if it exists) and its
# torch: nothing is installed. PART="layers monitor": these alone; see tests/benchmarks/gpu.py.
gpu:
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) tests/benchmarks/gpu.py $(if $(PART),--only $(PART))

# The stamps are touched last: an interrupted installation is done again, a finished one is not.
$(VENV)/.demo $(VENV)/.dev $(VENV)/.whole $(VENV)/.mutants: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf $(VENV) .mutants .mypy_cache .ruff_cache .pytest_cache dist runs site
