"""A script that trains with one system: ``python -m bench.script_alone SYSTEM FOLDER``. It starts a Ray of its own.

Writes ``marks.json``: when its imports were done, and how many seconds Ray's start took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(name: str, folder: Path) -> None:
    import ray

    from bench.measures.runs import train_start
    from bench.systems import make_system

    system = make_system(name, folder)
    imported, ray_init, took = time.time(), ray.init, []

    def timed(*args: Any, **settings: Any) -> Any:
        begun = time.time()
        try:
            return ray_init(*args, **settings)
        finally:
            took.append(time.time() - begun)

    ray.init = timed
    os.environ["RAY_ADDRESS"] = "local"  # another Ray of the machine is not joined
    if name != "raysgd":  # which starts it by itself
        ray.init()
    system.run(train_start, {})
    (folder / "marks.json").write_text(json.dumps({"imported": imported, "ray_s": sum(took)}), encoding="utf-8")
    system.reset()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
