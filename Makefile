# Every target works on a clean clone of a bare machine: python3 (3.11 to 3.13) with venv, make, git, a package index.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo ui up tunnel down test test-full test-apart test-beside lint

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Made again only when what it installs changes, so that a second call starts within seconds. Compiled here, once: a run
# starts a dozen processes, and where Python may not write bytecode (PYTHONDONTWRITEBYTECODE) each would compile torch anew.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "vitray needs Python 3.11 to 3.13, $(PYTHON) is `$(PYTHON) -V`: try make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "no venv module: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/.installed  ## draw a dataset, train on it with two workers, register the network (minutes)
	@test -e data/demo/dataset.json || $(BIN)/vitray shard demo data/demo images=6000 image_size=64 workers=2
	@$(BIN)/vitray train demo --json

ui: .venv/.installed  ## MLflow's pages about the runs of this folder
	@$(BIN)/vitray ui

CLUSTER ?= cluster.yaml

up: .venv/.installed  ## start the cluster of cluster.yaml (or of CLUSTER=FILE), or bring it up to date
	@$(BIN)/python -m vitray.cluster.launch $(CLUSTER)

tunnel: .venv/.installed  ## Ray on http://127.0.0.1:8265, MLflow on http://127.0.0.1:5000, until the shell is left
	$(BIN)/ray attach $(CLUSTER) -p 8265 -p 5000

down: .venv/.installed  ## keep MLflow's records, and end the cluster
	$(BIN)/ray exec $(CLUSTER) 'sudo systemctl start vitray-mlflow-save.service'
	$(BIN)/ray down $(CLUSTER)

test: .venv/.installed  ## install what is missing and run the tests (CPU, some ten minutes)
	$(BIN)/python -m pytest

# What the slow tests take for real: hosts with a network of their own, Ceph's S3, PostgreSQL, a browser, ssh.
PACKAGES := ceph-common ceph-mon ceph-osd radosgw postgresql chromium iproute2 util-linux systemd \
  dropbear-bin openssh-client rsync bsdutils

.venv/.packages: .venv/.installed Makefile
	@dpkg-query --show $(PACKAGES) >/dev/null 2>&1 || \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $(PACKAGES); } || \
		{ echo "make test-full needs Debian or Ubuntu, and root: $(PACKAGES)"; exit 1; }
	@touch $@

# These start Rays of their own, and wait more than they work: side by side with the others that share one, whose progress
# is shown, while what these say comes at their end.
APART := $(addprefix tests/test_,faults.py nodes.py jobs.py bench_sweep.py bench_train.py)

test-full: .venv/.packages  ## the same with the slow tests, and on a GPU where there is one; installs what they need, as root
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-apart test-beside

test-apart: .venv/.packages
	@$(BIN)/python -m pytest -m '' -rP --durations=20 $(APART) >.venv/apart.log 2>&1; status=$$?; cat .venv/apart.log; exit $$status

test-beside: .venv/.packages
	@$(BIN)/python -m pytest -m '' --durations=20 $(addprefix --ignore=,$(APART))

lint: .venv/.installed  ## ruff (lint and format) and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
