"""What is written when this process ends before its run: Ray ends it without Python if the cluster is lost. Driver side."""

from __future__ import annotations

import contextlib
import os
import subprocess

#: Waits for a line or the end of the pipe from this process, and writes its argument to stderr in the second case.
_WAIT = 'read -r word || printf "%s\\n" "$0" >&2'


class LastWords:
    """A small process that outlives this one, to say how the run is resumed, after all that Ray writes.

    Args:
        run_dir: The run's folder.
    """

    def __init__(self, run_dir: str) -> None:
        text = (
            f"[raysgd] this program has ended before its run in {run_dir}. If the run has ended with it, "
            f"raysgd.Trainer.restore({run_dir!r}) resumes it from its newest checkpoint."
        )
        self._process: subprocess.Popen[str] | None = None
        if os.name == "posix":
            with contextlib.suppress(OSError):  # no process can be started: the warning of the outage has to do
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", _WAIT, text], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
                )

    def withdraw(self) -> None:
        """End the process without a word: the run is over."""
        if self._process is not None:
            self._process.communicate("\n")
