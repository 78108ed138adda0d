# The two commands of the README. Each makes the environment first, if it is not there yet.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: table1 test test-ray lint
table1: $(VENV)/.installed
	$(RUN) sweeps/table1.py --resume $(ARGS)

test: $(VENV)/.installed
	$(RUN) -m pytest $(ARGS)

test-ray: $(VENV)/.installed
	$(RUN) -m pytest -m ray $(ARGS)

lint: $(VENV)/.installed
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m pyright

# CONSTRAINTS=constraints.txt installs the versions that CI uses.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fedcommons needs Python >= 3.11; name one: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[dev]'
	@touch $@
