"""Metrics as loggers need them: flat, plain Python values, strict JSON. Pure functions, free of any framework.

Metrics are what ``report`` accepts: numbers, text, None, arrays of numbers, and dicts and lists of these. The functions do
not fail on other values: what cannot be converted becomes its ``str``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from raysgd._util import metric_names
from raysgd._util.redact import redact_uri
from raysgd.errors import RunCancelledError
from raysgd.result import AUTOMATIC_KEYS, RunInfo

_MAX_TEXT = 32
_SCALARS = (bool, int, float, str, type(None))
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def short(value: Any) -> str:
    """Format a metric in a few characters: floats to 4 significant digits, text cut, None as ``-``."""
    if value is None:
        return "-"
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 1e6
        return f"{value:.1f}" if whole else f"{value:.4g}"
    return clip(in_one_line(value), _MAX_TEXT)


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return metrics as ``loss=0.1235  val/acc=0.9``."""
    return "  ".join(f"{name}={short(value)}" for name, value in flatten(metrics).items())


def clip(text: str, width: int) -> str:
    """Cut the text to ``width`` characters, with ``...`` at its end."""
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def in_one_line(value: Any) -> str:
    """Return the text of a value with each run of white space as one blank."""
    return " ".join(str(value).split())


def duration(seconds: float) -> str:
    """Format seconds as ``0:07``, ``12:34`` or ``1:02:03``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def time_left_s(iteration: int, time_total_s: float, num_iterations: int | None) -> float | None:
    """Return the seconds of training that are left at the mean pace so far; None if that is not known."""
    if num_iterations is None or not 0 < iteration < num_iterations or time_total_s <= 0:
        return None
    return (num_iterations - iteration) * time_total_s / iteration


def age_s(started_s: float) -> float:
    """Return the seconds since a time in seconds since the epoch; 0 if that is 0, which stands for not known."""
    return max(0.0, time.time() - started_s) if started_s else 0.0


def time_span(seconds: float) -> str:
    """Format seconds with a fitting unit: ``850 us``, ``12.3 ms``, ``4.56 s``, ``12:34``."""
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if 0 < seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def size(num_bytes: float) -> str:
    """Format bytes in decimal units: ``1.23 GB``."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    number = f"{num_bytes:.0f}" if unit == 0 else f"{num_bytes:#.3g}".rstrip(".")
    return f"{number} {_UNITS[unit]}"


def one_line(error: BaseException, width: int = 200) -> str:
    """Format an exception as ``ValueError: its text``, on one line."""
    text = in_one_line(error)
    return clip(f"{type(error).__name__}: {text}" if text else type(error).__name__, width)


def is_number(value: Any) -> bool:
    """Return whether a value can be plotted: an int or float (nan and infinities too), not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Return whether a value is a number that is neither nan nor infinite."""
    return is_number(value) and math.isfinite(as_float(value))


def as_float(value: float) -> float:
    """Convert a number to a float; an int that is too large becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def goodput_text(info: RunInfo) -> str:
    """Return a run's goodput so far, and the command that says more; empty if it is not known."""
    return "" if (goodput := info.goodput) is None else f"goodput {goodput:.0%}: raysgd why {redact_uri(info.run_dir)}"


def end_state(error: BaseException | None, outcome: str = "done") -> str:
    """Return how a run with this error, or with this outcome, ended: ``finished``, ``stopped``, ``cancelled`` or ``failed``."""
    if error is None:
        return "stopped" if outcome == "stopped" else "finished"
    return "cancelled" if isinstance(error, (RunCancelledError, KeyboardInterrupt)) else "failed"


def plain(value: Any) -> Any:
    """Convert a NumPy or framework scalar to a Python number, and an array to a list; return other values as they are."""
    if isinstance(value, (*_SCALARS, dict, list, tuple)):
        return value
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def flatten(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested dicts: ``{"val": {"loss": 1}}`` becomes ``{"val/loss": 1}``. Lists stay lists."""
    return {name: plain(value) for name, value in metric_names.flatten(metrics).items()}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the flattened metrics; nan and infinities are numbers, bools and text are not."""
    return {key: as_float(value) for key, value in flatten(metrics).items() if is_number(value)}


def split_automatic(result: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a result into the user's metrics and the keys that raysgd added."""
    own = {key: value for key, value in result.items() if key not in AUTOMATIC_KEYS}
    return own, {key: value for key, value in result.items() if key in AUTOMATIC_KEYS}


def unicode_text(text: str) -> str:
    """Return text that UTF-8 can hold: half of a surrogate pair, such as a byte of a file's name, is written by its number."""
    return text.encode("utf-8", "backslashreplace").decode()


def strict_json(value: Any) -> str:
    """Encode a value as one line of standard JSON. NaN and infinities are ``null``, as in JavaScript and pandas.

    ``NaN`` and ``Infinity`` are not JSON, and strict readers refuse ``1e999``, too.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"), default=_default)
    except (TypeError, ValueError):  # nan or an infinity, or a key that is not a string
        return _encode(value)


def _default(value: Any) -> Any:
    converted = plain(value)
    return str(value) if converted is value else converted


def _encode(value: Any) -> str:
    value = plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_encode_key(key)}:{_encode(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_encode, value)) + "]"
    return json.dumps(value if isinstance(value, _SCALARS) else str(value))


def _encode_key(key: Any) -> str:
    """Encode a key as `json` does: None is ``"null"``; what it refuses, such as a tuple, by its text."""
    try:
        return json.dumps({key: 0}, allow_nan=False, separators=(",", ":"))[1:-3]
    except (TypeError, ValueError):
        return json.dumps(str(key))
