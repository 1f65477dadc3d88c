#!/usr/bin/env bash
# Prints the path of a Python that can host the project: find_python.sh newest|oldest
#
# A candidate counts when its version is supported and it can make a virtual environment with pip.
# Looked at: PATH, pyenv's versions (also those not on PATH), uv's, and the usual folders of
# Homebrew, python.org and hand-made installations.
set -euo pipefail

supported="3.11 3.12 3.13"
which=${1:-newest}

candidates() { # version
    type -aP "python$1" || true
    local folder
    for folder in \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".* \
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}/cpython-$1".* \
        "/opt/homebrew/opt/python@$1" "/usr/local/opt/python@$1" \
        "/Library/Frameworks/Python.framework/Versions/$1" "/usr/local" "/opt/python$1"; do
        if [ -x "$folder/bin/python$1" ]; then echo "$folder/bin/python$1"; fi
    done
    type -aP python3 python || true # whatever their version turns out to be
}

# The real executable, since a pyenv shim depends on the directory it is called from.
probe='
import sys
if "%d.%d" % sys.version_info[:2] != sys.argv[1]: sys.exit(1)
import bz2, ctypes, ensurepip, lzma, ssl, venv
print(getattr(sys, "_base_executable", None) or sys.executable)
'

case $which in
newest) order=$(echo "$supported" | tr ' ' '\n' | sort -t. -k2nr) ;;
oldest) order=$(echo "$supported" | tr ' ' '\n' | sort -t. -k2n) ;;
*) echo "usage: $0 newest|oldest" >&2; exit 2 ;;
esac

for version in $order; do
    while read -r candidate; do
        if found=$("$candidate" -c "$probe" "$version" 2>/dev/null) && [ -n "$found" ]; then
            echo "$found"
            exit 0
        fi
    done < <(candidates "$version")
done

cat >&2 <<END
No usable Python found: cem_jax needs one of $supported with the venv and ensurepip modules
(on Debian and Ubuntu: apt install python3-venv). Name one yourself with: make PYTHON=/path/to/python
END
exit 1
