# The two commands of the README: `make reports/quarot_table1.md` sets up and runs the main job, `make test` sets up and
# passes the tests. Everything else is a convenience. PYTHON chooses the interpreter of the environment (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PATH := $(CURDIR)/$(BIN):$(PATH)

PARTS := part-0 part-1 part-2
.PHONY: all setup $(PARTS) test test-long test-machines trials speed lint format lock site gallery clean FORCE

all: setup
	snakemake --cores all

setup: $(READY)

$(READY): requirements.lock pyproject.toml workflow/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rotquant needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(MAKE) --no-print-directory --jobs=$(words $(PARTS)) $(PARTS)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation \
		--editable . --editable workflow
	touch $@

# pip unpacks on one core, so several share the lock, of which nothing has to be resolved. The call after them adds what no
# two may replace, and where torch is a CUDA build the wheels that the lock leaves to it.
$(PARTS): part-%:
	awk '/==/ && !/^(pip|setuptools)==/ && n++ % $(words $(PARTS)) == $*' requirements.lock \
		| $(BIN)/python -m pip install --quiet --no-deps --requirement /dev/stdin

# FORCE: whether a report is up to date is for Snakemake to decide, not for make.
reports/%: $(READY) FORCE
	snakemake --cores all $@

test: $(READY)
	$(BIN)/python -m pytest --numprocesses $$($(BIN)/python -c "import os; print(min(4, os.cpu_count() + 1))") --dist worksteal

# With those that are marked `long`: about twice as long. Before a release.
test-long: $(READY)
	$(BIN)/python -m pytest --long --numprocesses $$($(BIN)/python -c "import os; print(min(4, os.cpu_count() + 1))") --dist worksteal

# The numeric tests in the arithmetic of other machines; QUICK=--quick for the part that CI runs.
test-machines: $(READY)
	$(BIN)/python -m tests.machines $(QUICK)

# What can go wrong beyond one process on one machine (docs/reliability.md); QUICK=--quick for the part that CI runs.
TRIALS ?= slurm storage container tracking chaos gpus_workflow gpus_layers gpus_training engines readings fuzzing audit
trials: $(TRIALS:%=trial-%)
trial-%: $(READY) FORCE
	$(BIN)/python -m tests.trials.$* $(QUICK)

speed: $(READY)
	snakemake --cores all speed

lint: $(READY)
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow
	lint-imports --no-cache
	basedpyright

format: $(READY)
	ruff check --fix .
	ruff format .
	snakefmt Snakefile workflow

# torch is locked by its public version, so that the same lock takes the CPU or the CUDA build of the machine.
lock: $(READY)
	CUSTOM_COMPILE_COMMAND="make lock" pip-compile --quiet --allow-unsafe --strip-extras --extra dev --extra docs \
		--extra study --extra slurm --extra s3 --extra postgresql --no-emit-index-url --no-emit-find-links \
		--upgrade-package torch==2.13.0 --upgrade-package transformers==5.17.0 \
		--output-file requirements.lock pyproject.toml
	sed -i 's/^torch==\([0-9.]*\)+cpu/torch==\1/' requirements.lock

# The documentation as build/site/index.html, which needs no server but for its search; a broken link ends it.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --strict --quiet

gallery: $(READY)
	snakemake --cores all
	rotquant report gallery --output docs/gallery/shipped --beside docs/gallery

clean:
	rm -rf results/runs results/weights results/tables results/corpora reports logs .snakemake

FORCE:
