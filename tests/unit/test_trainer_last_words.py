"""The last line of a program that Ray ends without Python says how its run is resumed; of other programs it does not."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import os, sys, time
    from raysgd.controller import frames
    from raysgd.controller.frames import Frame
    from raysgd.trainer.stream import ResultStream

    seconds_ago, how = sys.argv[1:]

    class Channel:
        has_lost_cluster = False

        def stream(self, run_id):
            data = {"message": "the GCS is away", "run_dir": "/runs/it's/run_001"}
            event = {"kind": "warning", "timestamp": time.time() - float(seconds_ago), "data": data}
            yield [Frame(0, frames.EVENT, 0, data=event)]
            if how == "killed":
                print("Ray: the program will terminate", file=sys.stderr, flush=True)
                os._exit(1)
            yield [Frame(1, frames.RUN_END, 1, data={"kind": "done"}), Frame(2, frames.RUN_CLOSED, 1)]

        def values(self, run_id, first_only):
            return [None]

    list(ResultStream(Channel(), "run", reduce={}, returns="first", logs_warnings=False))
    print("over", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize(
    ("seconds_ago", "how", "last"),
    [
        (0, "killed", """raysgd.Trainer.restore("/runs/it's/run_001") resumes it from its newest checkpoint."""),
        (0, "over", "over"),
        (3600, "killed", "Ray: the program will terminate"),  # the outage of a run that is read once more is past
    ],
)
def test_last_line_is_about_the_run_if_it_is_lost(seconds_ago: int, how: str, last: str) -> None:
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(seconds_ago), how]
    written = subprocess.run(program, capture_output=True, text=True, timeout=60).stderr
    assert written.splitlines()[-1].endswith(last), written
