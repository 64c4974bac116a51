"""Fixtures that several modules of unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def loop() -> Iterator[Any]:
    """An asyncio loop in a thread of its own: a `support.listening.Loop`."""
    from support.listening import loop_in_thread

    with loop_in_thread() as loop:
        yield loop


@pytest.fixture
def closed_live_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close each live state after its test, and each holder of one, as the worker does when train_func has left."""
    from raysgd.session.live.state import LiveState
    from raysgd.workers.process.live import LiveHolder

    states, holders = _made(monkeypatch, LiveState), _made(monkeypatch, LiveHolder)
    yield
    for live in states:
        live.close()
    for holder in holders:
        holder.release()


def _made(monkeypatch: pytest.MonkeyPatch, kind: type) -> list[Any]:
    """Return the list to which all objects of a class are added that a test makes."""
    made: list[Any] = []
    init: Any = kind.__init__  # type: ignore[misc]
    monkeypatch.setattr(kind, "__init__", lambda one, *args, **given: init(one, *args, **given) or made.append(one))
    return made


@pytest.fixture
def group() -> Iterator[None]:
    """A torch process group of one member, in the process of the test."""
    from support.groups import group_of_one

    with group_of_one():
        yield
