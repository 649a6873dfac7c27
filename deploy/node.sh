#!/usr/bin/env bash
# What every node gets: the project in ~/venv, in the versions of constraints.txt. Runs at each start of the cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
chmod 700 ~/.ray ~/.mlflow
chmod 600 ~/.ray/auth_token ~/.mlflow/credentials

if ! test -x ~/venv/bin/pip; then
  # A new machine is updating itself: its lock is waited for.
  sudo apt-get -o DPkg::Lock::Timeout=600 -qq update
  sudo apt-get -o DPkg::Lock::Timeout=600 -qq install python3-venv
  python3 -m venv ~/venv
fi
~/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt uv
~/venv/bin/uv pip install --quiet --compile-bytecode --python ~/venv/bin/python -c constraints.txt -e .

# For `python` in jobs, and for `ray` over ssh. The first line, since the file ends early where nobody types.
line='export RAY_AUTH_MODE=token PATH="$HOME/venv/bin:$PATH"'
touch ~/.bashrc
if ! grep -qxF "$line" ~/.bashrc; then
  printf '%s\n' "$line" | cat - ~/.bashrc >~/.bashrc.new
  mv ~/.bashrc.new ~/.bashrc
fi
