#!/usr/bin/env bash
# Install the project in ~/venv. Runs on every node at each start of the cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
for secret in ~/.ray/auth_token ~/.mlflow/credentials; do
  if test -e $secret; then chmod 700 "$(dirname $secret)"; chmod 600 $secret; fi
done

if ! test -x ~/venv/bin/pip; then
  # A new machine updates itself, and holds the lock meanwhile.
  sudo apt-get -o DPkg::Lock::Timeout=600 -qq update
  sudo apt-get -o DPkg::Lock::Timeout=600 -qq install python3-venv
  python3 -m venv ~/venv
fi
# pip refuses a package whose hash is not in the list. It installs uv, which then installs the rest, in parallel.
awk '/^[^ ]/ {of_uv = /^uv==/} of_uv' deploy/requirements.txt >~/venv/uv.txt
~/venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r ~/venv/uv.txt
install="$HOME/venv/bin/uv pip install --quiet --compile-bytecode --python $HOME/venv/bin/python"
$install --require-hashes -r deploy/requirements.txt
$install --no-deps --no-build-isolation -e .

# For `python` in jobs, and for `ray` over ssh. It goes first, since .bashrc returns early in a non-interactive shell.
line='export RAY_AUTH_MODE=token PATH="$HOME/venv/bin:$PATH"'
touch ~/.bashrc
if ! grep -qxF "$line" ~/.bashrc; then
  printf '%s\n' "$line" | cat - ~/.bashrc >~/.bashrc.new
  mv ~/.bashrc.new ~/.bashrc
fi
