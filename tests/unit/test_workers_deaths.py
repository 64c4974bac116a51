"""What Ray says of a dead worker is told in one line: type, code and signal."""

from __future__ import annotations

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from raysgd.workers.deaths import death_reason, first_line

HEAD = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerActor\n\tpid: 3733\n"
    "The actor is dead because its worker process has died. Worker exit type: "
)
KILLED = (
    HEAD + "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. "
    "Some common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop "
    "--force was called, or (3) the worker crashed unexpectedly due to SIGSEGV or another unexpected error."
)
TERM = (
    HEAD + "SYSTEM_ERROR Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code 1. The process "
    "receives a SIGTERM."
)
RAY_KILL = "The actor died unexpectedly.\n\tpid: 1\nThe actor is dead because it was killed by `ray.kill`."
INIT = (
    "The actor died because of an error raised in its creation task, \x1b[36mray::WorkerActor.__init__()\x1b[39m (pid=1)\n"
    "Traceback"
)
OOM = (
    "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1, ID: ab) where the task ran "
    "was 15.3GB / 16GB (0.95), which exceeds the memory usage threshold of 0.95. Ray killed this worker because it was the "
    "most recently scheduled task.\nRefer to the documentation."
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RayActorError(None, KILLED),
            "SYSTEM_ERROR, Worker unexpectedly exits with a connection error code 2. End of file (such as by SIGKILL, also "
            "that of the kernel when memory runs out, or by a crash)",
        ),
        (
            RayActorError(None, TERM),
            "SYSTEM_ERROR, Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM",
        ),
        (RayActorError(None, RAY_KILL), "it was killed by `ray.kill`."),
        (
            RayActorError(None, INIT),
            "an error raised in its creation task, ray::WorkerActor.__init__() (pid=1)",
        ),
        (
            OutOfMemoryError(OOM),
            "Task was killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: ab) where the "
            "task ran was 15.3GB / 16GB (0.95), which exceeds the memory usage threshold of 0.95.",
        ),
        (RayActorError(), "The actor experienced an error before finishing this task."),
    ],
    ids=["killed", "terminated", "ray.kill", "constructor", "memory", "nothing known"],
)
def test_the_reason_of_a_death(error: Exception, reason: str) -> None:
    assert death_reason(error) == reason


def test_a_first_line_has_no_colours() -> None:
    assert first_line(RuntimeError("\n\x1b[36mray::f()\x1b[39m failed\nTraceback")) == "ray::f() failed"
    assert first_line(RuntimeError()) == "RuntimeError"
