# The two commands of the README. Each makes the environment first, if it is not there yet.
# LOCKED=1 installs the versions and the very files of requirements.lock, as CI does; without it, the newest that fit.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(VENV)/bin/pip install --quiet --disable-pip-version-check

.PHONY: table1 test snapshots test-long test-ray test-cpus test-cluster test-browser docs nightly cluster cluster-sync cluster-stop cluster-check lint lock
table1: $(VENV)/.installed
	$(RUN) sweeps/table1.py $(if $(wildcard runs),--resume) $(ARGS)

test: $(VENV)/.installed
	$(RUN) -m pytest -n 2 --dist worksteal $(ARGS)

test-long: $(VENV)/.installed
	$(RUN) -m pytest -m long -n 2 --dist worksteal $(ARGS)

# Writes the sentences of refused commands anew (tests/cli/test_refusals.py); look at the diff.
snapshots: $(VENV)/.installed
	$(RUN) -m pytest -n 0 --inline-snapshot=fix tests/cli/test_refusals.py $(ARGS)

# Only files with such tests are read, or those that ARGS names: importing all of tests/ takes longer than some tests.
MARKED = $(if $(filter tests/%,$(ARGS)),,$(shell grep --files-with-matches 'mark\.$(1)' --recursive --include='test_*.py' tests))
test-ray: $(VENV)/.installed
	$(RUN) -m pytest -m ray -n 2 --dist loadfile --timeout 1800 $(call MARKED,ray) $(ARGS)

# Needs root, iproute2, openssh-server and rsync; skips with the reason where they lack.
test-cluster: $(VENV)/.installed
	$(RUN) -m pytest -m cluster $(call MARKED,cluster) $(ARGS)

# Needs chromium (Debian's package); skips with the reason where it lacks.
test-browser: $(VENV)/.installed
	$(RUN) -m pytest -m browser $(call MARKED,browser) $(ARGS)

# FILES: filled in files; without them those of the repository, with their placeholders.
cluster-check: $(VENV)/.installed
	$(RUN) -W ignore cluster/check.py $(or $(FILES),--template cluster/aws.yaml ray_cluster.yaml cluster/Dockerfile)

# A Ray cluster: HOSTS="a b" USER=me KEY=~/.ssh/id OUT=/shared; HOSTS="": this machine alone. The script takes the variables
# of the command line (MAKEFLAGS), as the environment has a USER, too.
cluster: $(VENV)/.installed
	@$(RUN) -W ignore cluster/up.py $(filter-out cluster,$(MAKECMDGOALS))

cluster-sync cluster-stop: cluster-%: $(VENV)/.installed
	@$(RUN) -W ignore cluster/up.py $*

# The tests that compare bits, with the instructions of other CPUs, which round differently, and the tests that read and
# write texts most, in a locale that is not UTF-8. SAME: checks of every algorithm that no rounding decides.
CPUS := "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2" "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41"
BITS := $(addprefix tests/,algorithms/test_identities.py algorithms/test_every_algorithm.py \
  runs/test_resume.py convergence/test_laboratory.py core/test_weighted_examples.py \
  $(addprefix privacy/test_,dp_sgd_vmap.py private_steps.py planted_faults.py) generators/test_private_ddpm.py \
  algorithms/test_feddpms.py)
SAME := handed_in or workers_buffer or survive_pickling or of_the_tensors or named_by_a_release or be_priced
TEXTS := tests/cli/test_cli.py tests/reports/test_report.py
LOCALE := LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0
test-cpus: $(VENV)/.installed
	for cpu in $(CPUS); do echo "$$cpu" && env $$cpu $(LOCALE) $(RUN) -m pytest -m "not slow and not ray and not browser" -n 2 \
	  --dist worksteal --timeout 1800 --quiet -k "not ($(SAME))" $(BITS) $(TEXTS) $(ARGS) || exit; done

# The site, in docs/_build/html; warnings are errors, and nothing is fetched. -a: pages that are not written again lose their
# index entries, which lead the search.
docs: $(VENV)/.installed
	$(RUN) -m sphinx -a -W --keep-going -q -b html docs docs/_build/html $(ARGS)

# Slow evidence, by hand: PART=pages (ARGS="--minutes 60"), faults, folders or mutation; see docs/results/nightly.csv.
nightly: $(VENV)/.installed
	.ci/nightly "$(PART)" $(ARGS)

lint: $(VENV)/.installed
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m pyright
	PYTHONPATH=sweeps $(VENV)/bin/lint-imports

# Keeps the versions of constraints.txt where they still fit; ARGS=--upgrade takes the newest.
COMPILE := $(VENV)/lock/bin/uv pip compile --quiet --universal --fork-strategy fewest --no-annotate \
  --custom-compile-command "make lock"
lock:
	$(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/pip install --quiet --disable-pip-version-check uv
	$(COMPILE) --extra dev $(ARGS) --output-file constraints.txt pyproject.toml
	$(COMPILE) --extra dev --generate-hashes --constraint constraints.txt --output-file requirements.lock pyproject.toml
	$(COMPILE) --constraint constraints.txt pyproject.toml | $(PYTHON) .ci/sbom.py

$(VENV)/.installed: pyproject.toml $(if $(LOCKED),requirements.lock)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fedcommons needs Python >= 3.11; name one: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(INSTALL) --require-hashes --only-binary :all: --requirement requirements.lock
	$(INSTALL) --no-deps --no-build-isolation --editable .
else
	$(INSTALL) --editable '.[dev]'
endif
	@touch $@
