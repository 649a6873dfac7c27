# Every target works in a new clone; it needs python3 (3.11 to 3.13) with venv, make, git and a package index.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo speedrun up update tunnel down test test-full test-oldest gpu-report lint reference wheel docs docs-serve

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

speedrun: .venv/.installed  ## from cifar-10-binary.tar.gz, in this folder, to a network in five minutes
	@test -e cifar-10-binary.tar.gz || { echo "cifar-10-binary.tar.gz is not in this folder: it is the binary version" \
		"of https://www.cs.toronto.edu/~kriz/cifar.html"; exit 1; }
	@$(BIN)/vitray shard cifar-10-binary.tar.gz data/cifar10
	@$(BIN)/vitray train cifar10_speedrun --here tracking.register_as=cifar10

CLUSTER ?= cluster.yaml

up: .venv/.installed  ## start the cluster of cluster.yaml (or CLUSTER=FILE); on a running one, restart Ray
	@$(BIN)/python -m vitray.cluster.launch $(CLUSTER)

update: .venv/.installed  ## send changed files to a running cluster's head, without a restart of Ray, which ends all jobs
	@$(BIN)/python -m vitray.cluster.launch $(CLUSTER) --no-restart

tunnel: .venv/.installed  ## Ray on http://127.0.0.1:8265, MLflow on http://127.0.0.1:5000, until you exit the shell
	$(BIN)/ray attach $(CLUSTER) -p 8265 -p 5000

down: .venv/.installed  ## stop all jobs, which save first, save MLflow's records, and end the cluster
	$(BIN)/ray exec $(CLUSTER) 'RAY_ADDRESS=http://127.0.0.1:8265 python -m pipelines.stop --all && sudo systemctl start vitray-mlflow-save.service'
	$(BIN)/ray down $(CLUSTER)

# Three processes for two CPUs: tests wait for other processes a third of their time. Slow tests start many of their own,
# which fill 24 GiB beside those of three.
PROCESSES := 3
PYTEST = -m pytest -n $(PROCESSES) --dist loadgroup --no-loadscope-reorder --durations=20

# A test whose end hangs after its own timeout shows where, and ends its process.
SECONDS := 600
BOUND = -o faulthandler_timeout=$(SECONDS) -o faulthandler_exit_on_timeout=true

test: .venv/.installed  ## install missing packages and run the tests (CPU, about ten minutes)
	@$(BIN)/python $(PYTEST) $(BOUND)

.venv-oldest/.installed: .venv/.installed constraints-oldest.txt
	@$(PYTHON) -m venv --clear .venv-oldest
	$(BIN)/uv pip install --quiet --compile-bytecode --python .venv-oldest/bin/python -c constraints-oldest.txt -e '.[dev]'
	@touch $@

test-oldest: .venv-oldest/.installed  ## run the same tests with the lowest versions that pyproject.toml allows
	.venv-oldest/bin/python $(PYTEST) $(BOUND)

# Packages of the slow tests: hosts with their own network, Ceph's S3, PostgreSQL, Slurm, a browser, ssh.
PACKAGES := ceph-common ceph-mon ceph-osd radosgw postgresql slurm-wlm chromium iproute2 util-linux systemd \
  dropbear-bin openssh-client rsync bsdutils

.venv/.packages: .venv/.installed Makefile
	@dpkg-query --show $(PACKAGES) >/dev/null 2>&1 || \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $(PACKAGES); } || \
		{ echo "make test-full needs Debian or Ubuntu, and root: $(PACKAGES)"; exit 1; }
	@touch $@

test-full: PROCESSES := 2
test-full: SECONDS := 3600
test-full: .venv/.packages  ## run the slow and GPU tests too; installs their packages, as root
	@$(BIN)/python $(PYTEST) $(BOUND) -m ''

gpu-report: .venv/.installed  ## measure this machine's GPU in eight minutes, for docs/gpu.md
	$(BIN)/python -m experiments.gpu_report

requirements: .venv/.installed  ## renew deploy/requirements.txt, the packages of a node with their hashes
	echo uv setuptools | tr ' ' '\n' | $(BIN)/uv pip compile --quiet pyproject.toml - --extra server --constraints constraints.txt \
	  --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --output-file deploy/requirements.txt

reference: .venv/.installed  ## regenerate docs/settings.md, docs/reference/ and the notebooks of docs/tutorials/
	$(BIN)/python -m vitray.config settings > docs/settings.md
	$(BIN)/python experiments/site/generate_reference.py
	$(BIN)/python experiments/site/write_notebooks.py

# A build folder of before would keep removed files.
wheel: .venv/.installed  ## build dist/vitray-VERSION-py3-none-any.whl
	@rm -rf build
	$(BIN)/uv build --quiet --wheel --no-build-isolation --python $(BIN)/python

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
