#!/usr/bin/env bash
# install.sh FOLDER newest|oldest|PYTHON EXTRAS [REQUIREMENT…]
#
# Makes the virtual environment FOLDER if there is none that works, installs the package into it in
# editable form, and leaves FOLDER/installed to say so.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$1 python=$2 extras=$3
shift 3

if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    case $python in newest | oldest) python=$(tools/find_python.sh "$python") ;; esac
    echo "Making $folder with $("$python" --version) ($python)"
    "$python" -m venv --clear "$folder"
fi
echo "Installing cem_jax[$extras]${*:+ with $*} into $folder; the first time takes minutes"
"$folder/bin/python" -m pip install -qq --disable-pip-version-check -e ".[$extras]" "$@"
touch "$folder/installed"
