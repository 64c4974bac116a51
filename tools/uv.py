"""Run uv in the environment of this Python, with the package registry that pip is configured for.

    .venv/bin/python tools/uv.py pip install -c constraints.txt torch

uv does not read pip.conf or PIP_ variables, so this script passes their registry settings on. `pip install` falls back to
pip where uv cannot be installed or fails: pip's message is the one that people know.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
UV = Path(sys.executable).with_name("uv")
#: pip's setting: uv's variable, and what separates several values in it.
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}


def environment() -> dict[str, str]:
    """Return this process's environment with pip's registry settings added in uv's terms."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    found = {}
    # A variable (":env:.") comes first in the list and wins over a file ("install." over "global.").
    for section in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(section):
                found[name.removeprefix(section)] = str(ast.literal_eval(value))
    settings = {}
    for name, (variable, separator) in SETTINGS.items():
        if name in found:
            settings[variable] = separator.join(found[name].split())
    # As pip does: the best version of all indexes, where uv takes the first index that has the package; and compiled
    # modules, without which each process compiles them again where PYTHONDONTWRITEBYTECODE is set.
    ours = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_COMPILE_BYTECODE": "1", "VIRTUAL_ENV": sys.prefix}
    return settings | ours | os.environ


def has_uv() -> bool:
    """Install uv if it is missing; return whether it is there."""
    if not UV.exists():
        subprocess.run([*PIP, "install", "--quiet", "uv<1"], capture_output=True)
    return UV.exists()


def main() -> int:
    if has_uv():
        done = subprocess.run([UV, "--quiet", *sys.argv[1:]], env=environment())
        if done.returncode == 0:
            return 0
    if sys.argv[1:3] != ["pip", "install"]:
        return 1
    print("set-up: uv did not install this; trying pip, which takes longer", file=sys.stderr)
    return subprocess.run([*PIP, "-qq", *sys.argv[2:]]).returncode


if __name__ == "__main__":
    sys.exit(main())
