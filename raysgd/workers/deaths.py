"""What Ray says of a dead worker, in one line. Runs in the TrainerActor."""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError, RayActorError

#: The process is gone. Ray's memory monitor killed it, where it is the second.
DEATHS = (RayActorError, OutOfMemoryError)

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_EXIT = re.compile(r"exit type: (\w+) Worker exit detail: (.*)", re.DOTALL)
# Ray's advice, of several lines, which is the same for all of them.
_ADVICE = re.compile(r"\s*(Some common causes include|There are some potential root causes|If the process was killed)")
_DEAD_BECAUSE = re.compile(r"^The actor (?:is dead|died) because (.*)", re.MULTILINE)
_NO_WORD = "such as by SIGKILL, also that of the kernel when memory runs out, or by a crash"


def death_reason(error: BaseException) -> str:
    """The exit type, code and signal, as far as Ray knows them."""
    text = _COLOR.sub("", str(error))
    if isinstance(error, OutOfMemoryError):
        return " ".join(line.strip().partition(". ")[0].rstrip(".") + "." for line in text.splitlines()[:2])
    if found := _EXIT.search(text):
        detail = " ".join(_ADVICE.split(found[2])[0].split()).rstrip(".")
        return f"{found[1]}, {detail}" + (f" ({_NO_WORD})" if "connection error" in detail else "")
    because = _DEAD_BECAUSE.search(text)
    return because[1].strip().removeprefix("of ") if because else first_line(error)


def first_line(error: BaseException) -> str:
    """What an error of Ray's says before its explanations, without colours."""
    lines = [line.strip() for line in _COLOR.sub("", str(error)).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
