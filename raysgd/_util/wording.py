"""Small things about the words of messages."""

from __future__ import annotations


def with_article(noun: str) -> str:
    """``an int``, ``a dict``."""
    return f"{'an' if noun[:1].lower() in tuple('aeiou') else 'a'} {noun}"
