"""What Ray says of a dead worker, in one line. Runs in the TrainerActor."""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError, RayActorError

from raysgd.workers.out_of_memory import ADVICE, MemoryEvidence, grown, judge

#: The process is gone. Ray's memory monitor killed it, where it is the second.
DEATHS = (RayActorError, OutOfMemoryError)

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_EXIT = re.compile(r"exit type: (\w+) Worker exit detail: (.*)", re.DOTALL)
# Ray's advice, of several lines, which is the same for all of them.
_ADVICE = re.compile(r"\s*(Some common causes include|There are some potential root causes|If the process was killed)")
_DEAD_BECAUSE = re.compile(r"^The actor (?:is dead|died) because (.*)", re.MULTILINE)
_RAY_SAW = re.compile(r"was ([\d.]+)GB(?: used)? / ([\d.]+)GB")
_NO_WORD = "such as by SIGKILL, also that of the kernel when memory runs out, or by a crash"


def may_be_memory(error: BaseException) -> bool:
    """Whether a worker may have been killed for memory, as far as Ray knows."""
    return isinstance(error, OutOfMemoryError) or "connection error code" in str(error)


def death_reason(error: BaseException, memory: MemoryEvidence | None = None) -> str:
    """That memory ran out, or else the exit type, code and signal, as far as Ray knows them.

    Args:
        error: Ray's.
        memory: What the worker's node had seen of it, where `may_be_memory`.
    """
    text = _COLOR.sub("", str(error))
    if isinstance(error, OutOfMemoryError):
        return _killed_by_ray(text, memory)
    if memory is not None and (told := judge(memory)) is not None:
        return told
    if found := _EXIT.search(text):
        detail = " ".join(_ADVICE.split(found[2])[0].split()).rstrip(".")
        return f"{found[1]}, {detail}" + (f" ({_NO_WORD})" if "connection error" in detail else "")
    because = _DEAD_BECAUSE.search(text)
    return because[1].strip().removeprefix("of ") if because else first_line(error)


def was_told_to_end(reason: str) -> bool:
    """Whether what `death_reason` told is SIGTERM, which an idle worker obeys."""
    return "receives a SIGTERM" in reason


def _killed_by_ray(text: str, memory: MemoryEvidence | None) -> str:
    found = _RAY_SAW.search(text)  # its GB are GiB
    used = f", as {found[1]} of the node's {found[2]} GiB were in use" if found else ""
    told = [f"Ray's memory monitor ended it{used}", *([grown(memory.sizes)] if memory is not None else [])]
    return f"out of memory: {'; '.join(told)}. {ADVICE}"


def first_line(error: BaseException) -> str:
    """What an error of Ray's says before its explanations, without colours."""
    lines = [line.strip() for line in _COLOR.sub("", str(error)).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
