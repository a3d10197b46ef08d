# Commands for a fresh machine with Python 3.11 or newer and pip: `make run`, `make check`,
# `make test`, `make docs`, `make release`. `make install` alone sets up what a run needs.
# All make a virtual environment in .venv first, with the versions that the tests passed with.
# `make run` installs what a run needs; the others add what tests and docs need.
# `make install WITH=language` adds that extra of pyproject.toml; `WITH="language vision"` both.
PYTHON ?= python3
CORES ?= 2
CONFIG ?= config/config.yaml

PYTEST = .venv/bin/python -m pytest --numprocesses $(CORES) --dist worksteal

.PHONY: install run check test docs release clean

install: .venv/can-run $(addprefix .venv/has-,$(WITH))

run: .venv/can-run
	.venv/bin/trak run $(CONFIG) --cores $(CORES)

# Two minutes on two idle cores: the library, its jobs, and the kernels' twins; nothing that starts Snakemake or takes long.
check: .venv/can-test
	$(PYTEST) -m "not gate" tests/library tests/projection tests/stages tests/gramian

test: .venv/can-test
	$(PYTEST)

# Open build/site/index.html: no server is needed, and no network.
docs: .venv/can-test
	rm -rf build/site
	.venv/bin/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env \
		--conf-dir docs --doctree-dir build/doctrees . build/site

# What a package index takes, in dist/: see "A release" in CONTRIBUTING.md.
release: .venv/can-test
	rm -rf dist
	.venv/bin/python -m build --no-isolation --outdir dist
	.venv/bin/python -m twine check --strict dist/*

INSTALL = .venv/bin/python -m pip install --constraint constraints.txt --editable

.venv/can-run: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) ".[workflow,slurm]"
	touch $@

IMPORTS_language = transformers, peft
IMPORTS_vision = torchvision, timm
HINT_vision = torchvision is only where it came from torch's index. If it did not, \
	call: .venv/bin/python -m pip uninstall --yes torchvision; PIP_EXTRA_INDEX_URL=<torch's index> make install WITH=vision

.venv/has-%: .venv/can-run
	$(INSTALL) ".[workflow,slurm,$*]"
	@.venv/bin/python -c "import $(or $(IMPORTS_$*),trak_core)" || { echo "Error: what WITH=$* installed must be importable. $(HINT_$*)" >&2; exit 1; }
	touch $@

.venv/can-test: .venv/can-run
	$(INSTALL) ".[workflow,slurm,test]"
	touch $@

clean:
	rm -rf .venv
