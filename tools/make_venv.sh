#!/bin/sh
# Make the virtual environment, or say why it cannot be made. Usage: tools/make_venv.sh PYTHON VENV
# Called by the Makefile. An environment that is there and works is kept.
set -eu
python=$1
venv=$2
recent='import sys; sys.exit(sys.version_info < (3, 10))'

fail() {
    echo "set-up: $1" >&2
    exit 1
}

if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "$recent" 2>/dev/null && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "set-up: $venv is there already"
    exit 0
fi

command -v "$python" >/dev/null ||
    fail "there is no '$python' on the PATH; install Python 3.10 or newer, or name it: make PYTHON=/path/to/python3"
"$python" -c "$recent" ||
    fail "$("$python" --version 2>&1) is too old; raysgd needs Python 3.10 or newer: make PYTHON=/path/to/python3"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python comes without venv; on Debian and Ubuntu: apt install python3-venv"

echo "set-up: $venv with $("$python" --version)"
"$python" -m venv --clear "$venv"
