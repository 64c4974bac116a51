"""What the ranks are asked when they are to leave for another group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raysgd.workers import agreement as module
from raysgd.workers.agreement import Agreement


class Ranks:
    """Rank 0 can be told that its group is to change when it ``hears``."""

    def __init__(self) -> None:
        self.hears = False
        self.calls: list[str] = []

    async def call(self, method: str, *args: Any, ranks: Any = None) -> list[Any]:
        self.calls.append(method)
        if method == "change_group":
            return [self.hears]
        return [(1, 1)] * 2 if method == "hold" else [1, 1]


@pytest.fixture
def asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_AGAIN_S", 0.001)


async def test_who_hears_of_it_is_asked_for_nothing_else() -> None:
    ranks = Ranks()
    ranks.hears = True
    await Agreement(ranks.call).change_group(1)
    assert ranks.calls == ["change_group"]


async def test_who_does_not_leaves_out_of_a_save_and_is_told_again(asked_often: None) -> None:
    ranks = Ranks()
    asking = asyncio.ensure_future(Agreement(ranks.call).change_group(1))
    await asyncio.sleep(0.02)
    ranks.hears = True
    await asyncio.wait_for(asking, 10)
    assert ranks.calls[:4] == ["change_group", "hold_saves", "leave_after", "change_group"]


async def test_who_is_preempted_may_stop_instead(asked_often: None) -> None:
    ranks = Ranks()
    agreement = Agreement(ranks.call)
    asking = asyncio.ensure_future(agreement.change_group(1, stops=True))
    await asyncio.sleep(0.02)
    agreement.forget()
    await asyncio.wait_for(asking, 10)
    assert ranks.calls[:5] == ["change_group", "hold", "stop_from", "hold_saves", "leave_after"]


@pytest.mark.parametrize("how", ["called off", "another group", "another change"])
async def test_nobody_is_asked_on_for_what_is_over(asked_often: None, how: str) -> None:
    """The next attempt, perhaps of another run, may have the same number."""
    ranks = Ranks()
    agreement = Agreement(ranks.call)
    asking = asyncio.ensure_future(agreement.change_group(1))
    await asyncio.sleep(0.02)
    if how == "called off":
        await agreement.call_off_save(1)
    elif how == "another group":
        agreement.forget()
    else:
        ranks.hears = True
        await agreement.change_group(2)
    ranks.hears = False
    await asyncio.wait_for(asking, 10)
    asked = ranks.calls.count("change_group")
    await asyncio.sleep(0.02)
    assert ranks.calls.count("change_group") == asked
