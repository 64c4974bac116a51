"""Describes in one line why a worker died, from Ray's error and what its node knows of its memory. Runs in the TrainerActor."""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError, RayActorError

from raysgd._version import __version__
from raysgd.errors import ConfigError
from raysgd.workers.liveness.memory_use import ADVICE, MemoryEvidence, describe_growth, judge

#: Ray's errors for a process that is gone; the second one if Ray's memory monitor killed it.
DEATHS = (RayActorError, OutOfMemoryError)

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_EXIT = re.compile(r"exit type: (\w+) Worker exit detail: (.*)", re.DOTALL)
# Ray's general advice, several lines that are the same for every death.
_ADVICE = re.compile(r"\s*(Some common causes include|There are some potential root causes|If the process was killed)")
_DEAD_BECAUSE = re.compile(r"^The actor (?:is dead|died) because (.*)", re.MULTILINE)
_MONITOR_USAGE = re.compile(r"was ([\d.]+)GB(?: used)? / ([\d.]+)GB")
#: Ray's words for an actor whose class could not be unpickled.
_NOT_IMPORTED = "failed to import on the worker"
_IP = re.compile(r"\bip=([^,)\s]+)")
_LOST_CONNECTION = "for example by SIGKILL, which the kernel sends when memory runs out, or by a crash"


def may_be_memory(error: BaseException) -> bool:
    """Return True if Ray's error does not exclude that the worker was killed for its memory use."""
    return isinstance(error, OutOfMemoryError) or "connection error code" in str(error)


def describe_death(error: BaseException, memory: MemoryEvidence | None = None) -> str:
    """Say that memory ran out, or else what Ray knows of the exit: type, code and signal.

    Args:
        error: Ray's error.
        memory: What the worker's node knows of its memory, if `may_be_memory`.
    """
    text = _COLOR.sub("", str(error))
    if isinstance(error, OutOfMemoryError):
        return _describe_monitor_kill(text, memory)
    if memory is not None and (cause := judge(memory)) is not None:
        return cause
    if found := _EXIT.search(text):
        detail = " ".join(_ADVICE.split(found[2])[0].split()).rstrip(".")
        return f"{found[1]}, {detail}" + (f" ({_LOST_CONNECTION})" if "connection error" in detail else "")
    because = _DEAD_BECAUSE.search(text)
    return because[1].strip().removeprefix("of ") if because else first_line(error)


def explain_failed_start(error: BaseException) -> str | None:
    """Return why the constructor of an actor of raysgd failed, by Ray's error; None if the actor died for another reason.

    It fails in the same way when it is started again, because its process has another raysgd or none.
    """
    if not getattr(error, "actor_init_failed", False):
        return None
    text = _COLOR.sub("", str(error)).rstrip()
    cause = text.splitlines()[-1].strip().removeprefix(f"{ConfigError.__module__}.{ConfigError.__qualname__}: ")
    if _NOT_IMPORTED not in text:
        return cause
    ip = found[1] if (found := _IP.search(text)) else "an unknown node"
    return (
        f"the Python of a process on {ip} cannot load raysgd {__version__} of the driver ({cause}); install "
        f"raysgd {__version__} there"
    )


def was_sigterm(reason: str) -> bool:
    """Return True for a text of `describe_death` that names SIGTERM, which ends a worker between attempts."""
    return "receives a SIGTERM" in reason


def _describe_monitor_kill(text: str, memory: MemoryEvidence | None) -> str:
    found = _MONITOR_USAGE.search(text)  # Ray's GB are GiB
    used = f", as {found[1]} of the node's {found[2]} GiB were in use" if found else ""
    parts = [f"Ray's memory monitor ended it{used}", *([describe_growth(memory.sizes)] if memory is not None else [])]
    return f"out of memory: {'; '.join(parts)}. {ADVICE}"


def first_line(error: BaseException) -> str:
    """Return the first line of one of Ray's errors, without colours."""
    lines = [line.strip() for line in _COLOR.sub("", str(error)).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
