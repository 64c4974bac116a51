"""Run what a Dockerfile does, without Docker: ``python -m support.dockerfile DOCKERFILE CONTEXT FOLDER``.

FOLDER stands for the image's working directory, and the environment of this process for the image's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

#: Commands that are for the system of the image and are not run here.
OF_THE_SYSTEM = ("apt-get ",)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile in order, as (name, arguments)."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, words) for name, _, words in (line.partition(" ") for line in lines)]


def read(path: Path) -> dict[str, list[str]]:
    """Return the arguments of a Dockerfile's instructions by name."""
    found: dict[str, list[str]] = {}
    for name, words in instructions(path):
        found.setdefault(name, []).append(words)
    return found


def run(path: Path, context: Path, folder: Path) -> None:
    """Copy what COPY copies, and run what RUN runs, in a folder.

    Raises:
        ValueError: An instruction is not known here, or copies to a place outside of the folder.
        subprocess.CalledProcessError: A command failed.
    """
    for name, words in instructions(path):
        if name == "COPY":
            _copy(words.split(), context, folder)
        elif name == "RUN" and not words.startswith(OF_THE_SYSTEM):
            subprocess.run(["sh", "-c", words], cwd=folder, check=True)
        elif name not in ("ARG", "CMD", "ENV", "FROM", "RUN", "WORKDIR"):
            raise ValueError(f"{path}: {name} is not known here")


def _copy(words: list[str], context: Path, folder: Path) -> None:
    *sources, target = words
    if target.startswith(("/", "--")):
        raise ValueError(f"COPY to {target} is not known here: give a folder below WORKDIR")
    (folder / target).mkdir(parents=True, exist_ok=True)
    for pattern in sources:
        found = sorted(context.glob(pattern))
        if not found:
            raise ValueError(f"COPY {pattern}: there is no such file; the wheel is built by `make wheel`")
        for source in found:
            if source.is_dir():
                shutil.copytree(source, folder / target, dirs_exist_ok=True)
            else:
                shutil.copy2(source, folder / target)


if __name__ == "__main__":
    run(*(Path(word).resolve() for word in sys.argv[1:]))
