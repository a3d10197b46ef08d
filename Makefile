# Commands for a fresh machine with Python 3.11 or newer and pip: `make run`, `make check`,
# `make test`, `make docs`.
# All first make a virtual environment in .venv, with the versions that the tests passed with.
PYTHON ?= python3
CORES ?= 2
CONFIG ?= config/config.yaml

PYTEST = .venv/bin/python -m pytest --numprocesses $(CORES) --dist worksteal

.PHONY: run check test docs clean

run: .venv/complete
	.venv/bin/snakemake --cores $(CORES) --configfile $(CONFIG)

# Two minutes: the library, its jobs, and the kernels' twins; nothing that starts Snakemake or takes long.
check: .venv/complete
	$(PYTEST) -m "not gate" tests/library tests/projection tests/stages tests/gramian

test: .venv/complete
	$(PYTEST)

docs: .venv/complete
	.venv/bin/python -m pdoc --docformat google --output-directory build/api trak_core '!trak_core.stages'

.venv/complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --constraint constraints.txt --editable ".[workflow,slurm,test]"
	touch $@

clean:
	rm -rf .venv
