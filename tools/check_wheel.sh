#!/bin/sh
# Build the wheel, and run the commands of examples/cluster/Dockerfile in an empty environment: they install the wheel with the
# pinned versions. Then run the training of that image, and the quickstart's programs.
# Usage: tools/check_wheel.sh VENV, the environment of this checkout. The wheel stays in dist/.
set -eu
venv=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bare=$work/venv

echo "wheel: build"
rm -f dist/raysgd-*.whl
"$venv/bin/python" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .

echo "wheel: run the commands of examples/cluster/Dockerfile"
"$venv/bin/python" -m venv "$bare"
image=$work/training
mkdir "$image" "$work/bin"
# The Dockerfile's pip, with uv where it can be had: a quarter of the time.
printf '#!/bin/sh\nexec "%s" "%s" pip "$@"\n' "$bare/bin/python" "$PWD/tools/uv.py" >"$work/bin/pip"
chmod +x "$work/bin/pip"
PATH="$work/bin:$bare/bin:$PATH" PYTHONPATH=$PWD/tests "$venv/bin/python" -m support.dockerfile \
    examples/cluster/Dockerfile . "$image"

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
set -- raysgd_runs/*/run_001
"$bare/bin/raysgd" report "$1" >/dev/null

echo "wheel: run the training of the image"
HOME=$work RAY_ADDRESS=local PYTHONPATH=$image "$bare/bin/raysgd" train -f "$image/digits.yaml" --max_epochs 2 \
    --checkpoint.save_dir "$work/storage/digits" --checkpoint.resume_from last >train.log 2>&1 || { cat train.log; exit 1; }
grep finished_train_steps train.log
echo "wheel: the quickstart and the training run, and the command writes the page of a run"
