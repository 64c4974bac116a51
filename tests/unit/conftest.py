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
    """Close each live state after its test, as the worker does when train_func has left."""
    from raysgd.session.live.state import LiveState

    made: list[LiveState] = []
    init = LiveState.__init__
    monkeypatch.setattr(LiveState, "__init__", lambda live, *given: init(live, *given) or made.append(live))
    yield
    for live in made:
        live.close()


@pytest.fixture
def group() -> Iterator[None]:
    """A torch process group of one member, in the process of the test."""
    from support.groups import group_of_one

    with group_of_one():
        yield
