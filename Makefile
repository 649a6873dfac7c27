# Every target works in a new clone; it needs python3 (3.11 to 3.13) with venv, make, git and a package index.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo ui up update tunnel down test test-ray test-oldest test-full test-apart test-beside lint settings reference gpu-report notebooks wheel docs docs-serve

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Runs again only when the pins change. It compiles bytecode once: a run starts a dozen processes, and each would
# compile torch again where Python may not write bytecode (PYTHONDONTWRITEBYTECODE).
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "vitray needs Python 3.11 to 3.13, $(PYTHON) is `$(PYTHON) -V`: try make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "no venv module: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/.installed  ## draw a dataset, train on it with two workers, register the model (minutes)
	@$(BIN)/vitray demo --json

ui: .venv/.installed  ## open MLflow on the runs of this folder
	@$(BIN)/vitray ui

CLUSTER ?= cluster.yaml

up: .venv/.installed  ## start the cluster of cluster.yaml (or CLUSTER=FILE); on a running one, restart Ray
	@$(BIN)/python -m vitray.cluster.launch $(CLUSTER)

update: .venv/.installed  ## send changed files to a running cluster's head, without a restart of Ray, which ends all jobs
	@$(BIN)/python -m vitray.cluster.launch $(CLUSTER) --no-restart

tunnel: .venv/.installed  ## Ray on http://127.0.0.1:8265, MLflow on http://127.0.0.1:5000, until you exit the shell
	$(BIN)/ray attach $(CLUSTER) -p 8265 -p 5000

down: .venv/.installed  ## save MLflow's records, and end the cluster
	$(BIN)/ray exec $(CLUSTER) 'sudo systemctl start vitray-mlflow-save.service'
	$(BIN)/ray down $(CLUSTER)

# The tests that share one Ray mostly wait for its processes, so they run beside the others, of which each part is the
# files of some letters, a short part last. The output of each appears at its end.
FAST := not slow and not gpu
PARTS := s a-d t-z e-l m-r

test: .venv/.installed  ## install missing packages and run the tests (CPU, about ten minutes)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target test-ray $(PARTS:%=test-%)

test-ray: .venv/.installed
	@$(BIN)/python -m pytest -m 'ray and $(FAST)' --durations=10

.PHONY: $(PARTS:%=test-%)
$(PARTS:%=test-%): test-%: .venv/.installed
	@$(BIN)/python -m pytest -m 'not ray and $(FAST)' --durations=5 tests/test_[$*]*.py

.venv-oldest/.installed: .venv/.installed constraints-oldest.txt
	@$(PYTHON) -m venv --clear .venv-oldest
	$(BIN)/uv pip install --quiet --compile-bytecode --python .venv-oldest/bin/python -c constraints-oldest.txt -e '.[dev]'
	@touch $@

test-oldest: .venv-oldest/.installed  ## run the same tests with the lowest versions that pyproject.toml allows
	.venv-oldest/bin/python -m pytest

# Packages of the slow tests: hosts with their own network, Ceph's S3, PostgreSQL, a browser, ssh.
PACKAGES := ceph-common ceph-mon ceph-osd radosgw postgresql chromium iproute2 util-linux systemd \
  dropbear-bin openssh-client rsync bsdutils

.venv/.packages: .venv/.installed Makefile
	@dpkg-query --show $(PACKAGES) >/dev/null 2>&1 || \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $(PACKAGES); } || \
		{ echo "make test-full needs Debian or Ubuntu, and root: $(PACKAGES)"; exit 1; }
	@touch $@

# These tests start their own Rays and mostly wait, so they run beside the others, which share one. The output of the
# others appears at once, that of these at their end.
APART := $(addprefix tests/test_,faults.py nodes.py jobs.py bench_train.py scaling.py)

test-full: .venv/.packages  ## run the slow and GPU tests too; installs their packages, as root
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-apart test-beside

test-apart: .venv/.packages
	@$(BIN)/python -m pytest -m '' -rP --durations=20 $(APART) >.venv/apart.log 2>&1; status=$$?; cat .venv/apart.log; exit $$status

test-beside: .venv/.packages
	@$(BIN)/python -m pytest -m '' --durations=20 $(addprefix --ignore=,$(APART))

reference: .venv/.installed  ## regenerate docs/reference/
	$(BIN)/python experiments/site/generate_reference.py

notebooks: .venv/.installed  ## regenerate the notebooks of docs/tutorials/ from their pages
	$(BIN)/python experiments/site/write_notebooks.py

# A build folder of before would keep removed files.
wheel: .venv/.installed  ## build dist/vitray-VERSION-py3-none-any.whl
	@rm -rf build
	$(BIN)/uv build --quiet --wheel --no-build-isolation --python $(BIN)/python

gpu-report: .venv/.installed  ## measure one GPU in under 25 minutes and write docs/gpu.md
	$(BIN)/python experiments/gpu_report.py

settings: .venv/.installed  ## regenerate docs/settings.md
	$(BIN)/python -m vitray.config settings > docs/settings.md

# Packages of the site alone. It is built offline, and loads nothing from other hosts.
.venv-docs/.installed: .venv/.installed pyproject.toml constraints.txt experiments/site/fetch_mermaid.py
	@$(PYTHON) -m venv --clear .venv-docs
	$(BIN)/uv pip install --quiet --python .venv-docs/bin/python -c constraints.txt mkdocs-material
	$(BIN)/python experiments/site/fetch_mermaid.py .venv-docs
	@touch $@

docs: .venv-docs/.installed  ## build the site of docs/ in site/, and check its links
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

DOCS_ADDRESS ?= 127.0.0.1:8001

docs-serve: .venv-docs/.installed  ## show the site on http://127.0.0.1:8001 (or DOCS_ADDRESS)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve --strict --dev-addr $(DOCS_ADDRESS)

lint: .venv/.installed  ## run ruff (lint and format) and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
