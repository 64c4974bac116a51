"""Format words, sizes and times for messages."""

from __future__ import annotations

import inspect
import re


def with_article(noun: str) -> str:
    """Return the noun with its article: ``an int``, ``a dict``."""
    return f"{'an' if noun[:1].lower() in tuple('aeiou') else 'a'} {noun}"


def in_bytes(size: float) -> str:
    """Format bytes as ``21.8 GiB``, or as ``350 MiB`` below one GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def in_time(seconds: float) -> str:
    """Format seconds as ``30 s``, ``12 min`` or ``2.5 h``."""
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def read_attributes(docstring: str | None, section: str = "Attributes") -> dict[str, str]:
    """Return what a section of a docstring, ``Attributes`` or ``Args``, says of each name, without quotes of code."""
    listed = inspect.cleandoc(docstring or "").partition(f"{section}:\n")[2].replace("`", "")
    return {
        name: " ".join(text.split())
        for name, text in re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    }
