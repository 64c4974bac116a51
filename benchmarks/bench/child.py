"""The process that measures one system: ``python -m bench.child SPEC``, started by `bench.children`.

It writes a line of JSON after each measure, so that nothing is lost if a later measure hangs.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.machine import without_paths
from bench.measures import FRAGILE, load_measure
from bench.systems import make_fragile_system, make_system
from bench.systems.base import System

_MAX_ERROR = 300


def main(spec_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    folder = Path(spec["folder"])
    make = make_fragile_system if set(spec["measures"]) <= set(FRAGILE) else make_system
    system = make(spec["system"], folder)
    with (folder / "lines.jsonl").open("w", encoding="utf-8") as lines:
        system.open()
        try:
            for name, params in spec["measures"].items():
                line = {"measure": name, **_measure(system, name, params, spec["timeout_s"])}
                lines.write(json.dumps(line) + "\n")
                lines.flush()
        finally:
            system.close()


def _measure(system: System, name: str, params: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    try:
        with _time_limit(timeout_s):
            series = load_measure(name).run(system, params)
            return {"series": series, "errors": getattr(system, "failures", [])}
    except Exception as error:
        traceback.print_exc()
        lines = [line for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {lines[0] if lines else ''}"
        system.reset()
        return {"error": without_paths(text)[:_MAX_ERROR]}


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def give_up(signum: int, frame: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    main(sys.argv[1])
