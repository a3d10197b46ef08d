# Two commands for a fresh machine with Python 3.11 or newer and pip: `make run` and `make test`.
# Both first make a virtual environment in .venv, with the versions that the tests passed with.
PYTHON ?= python3
CORES ?= 2
CONFIG ?= config/config.yaml

.PHONY: run test clean

run: .venv/complete
	.venv/bin/snakemake --cores $(CORES) --configfile $(CONFIG)

test: .venv/complete
	.venv/bin/python -m pytest

.venv/complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --constraint constraints.txt --editable ".[workflow,slurm,test]"
	touch $@

clean:
	rm -rf .venv
