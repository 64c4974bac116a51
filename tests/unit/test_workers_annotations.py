"""Annotations of the driver's script resolve in another process, although its ``__main__`` is another program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from support.project import ROOT

SCRIPT = """
from __future__ import annotations

import enum
import sys
import threading
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Optional

import raysgd.workers.pickling as pickling

LIMIT = 3


class Mode(enum.Enum):
    TRAIN = "train"


@dataclass
class Sizes:
    width: int = 4
    parent: Optional[Sizes] = None


class Locked:
    lock = threading.Lock()


@dataclass
class Settings:
    mode: Mode = Mode.TRAIN
    sizes: "list[Sizes]" = None
    path: Path = Path(".")
    size: Annotated[int, LIMIT] = 1


@dataclass
class Holds:
    locked: Locked = None
    mode: Mode = Mode.TRAIN


def made_inside():
    @dataclass
    class Flags:
        mode: Optional[Mode] = None

    return Flags


def uses(mode: Mode, frame: "pandas.DataFrame") -> Sizes:
    return mode


def train_func():
    hints = {kind.__name__: sorted(typing.get_type_hints(kind)) for kind in (Settings, Sizes, made_inside())}
    hints["uses"] = sorted(typing.get_type_hints(made_inside)), uses(1, 2)
    hints["is same"] = typing.get_type_hints(Settings)["mode"] is Mode and typing.get_type_hints(Settings)["size"] is int
    hints["pandas"] = "pandas" in sys.modules
    return hints


def holds():
    return Holds().mode.value


import pandas

for name, function in (("train", train_func), ("holds", holds)):
    Path(sys.argv[1], name).write_bytes(pickling.dumps(function))
LIMIT = 4
again = pickling.loads(pickling.dumps(Settings))
assert again is Settings and LIMIT == 4, "the names of the script itself stay"
"""

OTHER = """
import json, sys
from pathlib import Path
import raysgd.workers.pickling as pickling

found = {"train": pickling.loads(Path(sys.argv[1], "train").read_bytes())()}
found["holds"] = pickling.loads(Path(sys.argv[1], "holds").read_bytes())()
print(json.dumps(found))
"""


def run(program: str, folder: Path) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, path, folder], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_annotations_of_the_script_resolve_in_another_process(tmp_path: Path) -> None:
    run(SCRIPT, tmp_path)
    found = json.loads(run(OTHER, tmp_path))
    assert found["train"] == {
        "Settings": ["mode", "path", "size", "sizes"],
        "Sizes": ["parent", "width"],
        "Flags": ["mode"],
        "uses": [[], 1],
        "is same": True,
        "pandas": False,
    }
    assert found["holds"] == "train", "a class whose annotation does not pickle does itself"
