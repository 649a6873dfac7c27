#!/usr/bin/env bash
# Install the project in ~/venv, in the versions of constraints.txt. Runs on every node at each start of the cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
chmod 700 ~/.ray ~/.mlflow
chmod 600 ~/.ray/auth_token ~/.mlflow/credentials

if ! test -x ~/venv/bin/pip; then
  # A new machine updates itself, and holds the lock meanwhile.
  sudo apt-get -o DPkg::Lock::Timeout=600 -qq update
  sudo apt-get -o DPkg::Lock::Timeout=600 -qq install python3-venv
  python3 -m venv ~/venv
fi
~/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt uv
~/venv/bin/uv pip install --quiet --compile-bytecode --python ~/venv/bin/python -c constraints.txt -e .

# For `python` in jobs, and for `ray` over ssh. It goes first, since .bashrc returns early in a non-interactive shell.
line='export RAY_AUTH_MODE=token PATH="$HOME/venv/bin:$PATH"'
touch ~/.bashrc
if ! grep -qxF "$line" ~/.bashrc; then
  printf '%s\n' "$line" | cat - ~/.bashrc >~/.bashrc.new
  mv ~/.bashrc.new ~/.bashrc
fi
