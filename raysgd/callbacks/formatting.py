"""Short texts of numbers, durations, sizes and errors, for lines and tables people read. Pure functions."""

from __future__ import annotations

import math
from typing import Any

from raysgd.errors import RunCancelledError

_MAX_TEXT = 32
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def short(value: Any) -> str:
    """A metric in a few characters: floats to 4 significant digits, text cut, None as ``-``."""
    if value is None:
        return "-"
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 1e6
        return f"{value:.1f}" if whole else f"{value:.4g}"
    return clip(" ".join(str(value).split()), _MAX_TEXT)


def clip(text: str, width: int) -> str:
    """The text, cut to ``width`` characters with ``...`` at its end."""
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def duration(seconds: float) -> str:
    """``0:07``, ``12:34`` or ``1:02:03``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def time_span(seconds: float) -> str:
    """A span with a fitting unit: ``850 us``, ``12.3 ms``, ``4.56 s``, ``12:34``."""
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if 0 < seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def size(num_bytes: float) -> str:
    """Bytes in decimal units: ``1.23 GB``."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    number = f"{num_bytes:.0f}" if unit == 0 else f"{num_bytes:#.3g}".rstrip(".")
    return f"{number} {_UNITS[unit]}"


def one_line(error: BaseException, width: int = 200) -> str:
    """``ValueError: its text``, on one line."""
    text = " ".join(str(error).split())
    return clip(f"{type(error).__name__}: {text}" if text else type(error).__name__, width)


def is_number(value: Any) -> bool:
    """Whether it can be plotted: an int or float (nan and infinities too), no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number that is neither nan nor infinite."""
    return is_number(value) and math.isfinite(as_float(value))


def as_float(value: float) -> float:
    """The number as a float; an int that no float can hold is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def end_state(error: BaseException | None) -> str:
    """The state a run with this outcome ended in: ``finished``, ``cancelled`` or ``failed``."""
    if error is None:
        return "finished"
    return "cancelled" if isinstance(error, (RunCancelledError, KeyboardInterrupt)) else "failed"
