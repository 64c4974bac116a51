"""The cause of a worker's death is described in one line: type, code and signal."""

from __future__ import annotations

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from raysgd._version import __version__
from raysgd.workers.liveness.death_reasons import (
    describe_death,
    explain_failed_start,
    first_line,
    may_be_memory,
    was_sigterm,
)
from raysgd.workers.liveness.memory_use import ADVICE, MemoryEvidence, MemoryPool, Size

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
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: ab) was 15.31GB "
    "used / 16.00GB limit (0.956875)\nOOM kill reason: Memory usage 16438587392B exceeded threshold of 16320875724B (95.0% of "
    "17179869184B limit)\nObject store memory usage: [- objects spillable: 0\n]\nRay killed 1 worker(s) based on the killing "
    "policy\nRefer to the documentation."
)
OLDER_OOM = (
    "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1, ID: ab) where the task ran "
    "was 15.3GB / 16GB (0.95), which exceeds the memory usage threshold of 0.95. Ray killed this worker because it was the "
    "most recently scheduled task.\nRefer to the documentation."
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RayActorError(None, KILLED),
            "SYSTEM_ERROR, Worker unexpectedly exits with a connection error code 2. End of file (for example by SIGKILL, which "
            "the kernel sends when memory runs out, or by a crash)",
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
            f"out of memory: Ray's memory monitor ended it, as 15.31 of the node's 16.00 GiB were in use. {ADVICE}",
        ),
        (OutOfMemoryError("Killed."), f"out of memory: Ray's memory monitor ended it. {ADVICE}"),
        (RayActorError(), "The actor experienced an error before finishing this task."),
    ],
    ids=["killed", "terminated", "ray.kill", "constructor", "memory", "memory, without numbers", "nothing known"],
)
def test_death_is_described_by_what_ray_knows(error: Exception, reason: str) -> None:
    assert describe_death(error) == reason


def test_sigterm_is_distinguished_from_other_deaths() -> None:
    reasons = [describe_death(RayActorError(None, text)) for text in (KILLED, TERM, RAY_KILL, INIT)]
    assert [was_sigterm(reason) for reason in reasons] == [False, True, False, False]


GROWN = MemoryEvidence(
    (Size(0.0, 1 << 30), Size(9.0, 15 << 30)),
    MemoryPool("the node", 16 << 30, 15 << 30),
    kills=1,
    counted="on the node",
)
SMALL = MemoryEvidence((Size(0.0, 1 << 30),), MemoryPool("the node", 16 << 30, 2 << 30))


def test_memory_is_named_if_the_node_has_evidence() -> None:
    assert describe_death(RayActorError(None, KILLED), GROWN) == (
        "out of memory: its resident size grew from 1.0 GiB to 15.0 GiB in 9 s; the node has 16.0 GiB, 15.0 GiB of it in use; "
        f"the kernel's count of memory kills on the node went up. {ADVICE}"
    )
    assert describe_death(RayActorError(None, KILLED), SMALL) == describe_death(RayActorError(None, KILLED))


@pytest.mark.parametrize(
    ("text", "used"),
    [(OOM, "15.31 of the node's 16.00 GiB"), (OLDER_OOM, "15.3 of the node's 16 GiB")],
    ids=["new", "old"],
)
def test_kill_by_rays_memory_monitor_is_described_with_the_nodes_evidence(text: str, used: str) -> None:
    growth = "its resident size grew from 1.0 GiB to 15.0 GiB in 9 s"
    assert describe_death(OutOfMemoryError(text), GROWN) == (
        f"out of memory: Ray's memory monitor ended it, as {used} were in use; {growth}. {ADVICE}"
    )


def test_only_deaths_that_may_be_kills_for_memory_are_looked_up() -> None:
    errors = [RayActorError(None, text) for text in (KILLED, TERM, RAY_KILL, INIT)]
    assert [may_be_memory(error) for error in [*errors, OutOfMemoryError(OOM)]] == [True, False, False, False, True]


def test_first_line_has_no_colours() -> None:
    assert first_line(RuntimeError("\n\x1b[36mray::f()\x1b[39m failed\nTraceback")) == "ray::f() failed"
    assert first_line(RuntimeError()) == "RuntimeError"


def test_process_that_cannot_load_raysgd_is_explained_by_what_to_install() -> None:
    text = (
        "The actor died because of an error raised in its creation task, \x1b[36mray::WorkerActor.__init__()\x1b[39m (pid=1, "
        "ip=10.0.0.2, actor_id=ab)\nRuntimeError: The actor with name WorkerActor failed to import on the worker. This may be "
        "because\n\nTraceback (most recent call last):\nModuleNotFoundError: No module named 'raysgd'\n"
    )
    assert explain_failed_start(RayActorError(None, text, actor_init_failed=True)) == (
        f"the Python of a process on 10.0.0.2 cannot load raysgd {__version__} of the driver (ModuleNotFoundError: No module "
        f"named 'raysgd'); install raysgd {__version__} there"
    )


def test_error_of_a_constructor_is_its_own_explanation() -> None:
    text = f"{INIT}\nraysgd.errors.ConfigError: raysgd 1 of the TrainerActor cannot work with raysgd 2 of the driver\n"
    error = RayActorError(None, text, actor_init_failed=True)
    assert explain_failed_start(error) == "raysgd 1 of the TrainerActor cannot work with raysgd 2 of the driver"
    assert explain_failed_start(RayActorError(None, KILLED)) is None
    assert explain_failed_start(OutOfMemoryError(OOM)) is None
