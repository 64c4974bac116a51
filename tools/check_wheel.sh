#!/bin/sh
# Build the wheel, install it with the pinned versions into an empty environment, and run the quickstart's programs there.
# Usage: tools/check_wheel.sh VENV, the environment of this checkout. The wheel stays in dist/.
set -eu
venv=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bare=$work/venv

echo "wheel: build"
rm -f dist/raysgd-*.whl
"$venv/bin/python" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
wheel=$(echo dist/raysgd-*.whl)

echo "wheel: install $wheel with the pinned versions"
"$venv/bin/python" -m venv "$bare"
"$bare/bin/python" tools/uv.py pip install -c constraints.txt "$(grep -oE '^torch==[^ ;]+' constraints.txt)"
"$bare/bin/python" tools/uv.py pip install -c constraints.txt "raysgd[torch] @ file://$PWD/$wheel"

echo "wheel: run doc/quickstart.md"
PYTHONPATH=tests "$venv/bin/python" -c '
import sys
from pathlib import Path
from support.snippets import snippets
programs = [block.code for block in snippets(Path("doc/quickstart.md"), "python")]
Path(sys.argv[1]).write_text("\n".join(programs))' "$work/quickstart.py"
cd "$work"
HOME=$work RAY_ADDRESS=local "$bare/bin/python" quickstart.py >quickstart.log 2>&1 || { cat quickstart.log; exit 1; }
"$bare/bin/python" -c 'import raysgd, sys; sys.exit("/site-packages/" not in raysgd.__file__)'
"$bare/bin/raysgd" --version
echo "wheel: the quickstart runs, and the command is there"
