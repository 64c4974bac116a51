"""The one way in which raysgd speaks to a person outside of callbacks: a line on standard error."""

from __future__ import annotations

import sys


def tell(text: str) -> None:
    """Write ``[raysgd] text``."""
    sys.stderr.write(f"[raysgd] {text}\n")
    sys.stderr.flush()
