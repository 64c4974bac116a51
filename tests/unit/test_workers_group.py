"""All ranks agree on the place where they stop or leave."""

from __future__ import annotations

from typing import Any

from raysgd.workers.group.group import RankAgreement


class FakeRanks:
    """Two ranks: the first is one ``should_stop()`` and one save ahead, the second two reports."""

    def __init__(self) -> None:
        self.limits: dict[str, Any] = {}

    async def call(self, method: str, attempt: int, *limits: Any) -> list[Any]:
        assert attempt == 7
        if limits:
            self.limits[method] = limits
        return {"hold": [(4, 1), (3, 3)], "hold_saves": [2, 1]}.get(method, [None, None])


async def test_all_ranks_stop_at_the_furthest_place_that_any_rank_has_reached() -> None:
    ranks = FakeRanks()
    await RankAgreement(ranks.call).stop(7, ends_reports=True)
    assert ranks.limits["stop_from"] == (4, 3)


async def test_reports_continue_if_the_stop_does_not_end_them() -> None:
    ranks = FakeRanks()
    await RankAgreement(ranks.call).stop(7, ends_reports=False)
    assert ranks.limits["stop_from"] == (4, None)


async def test_all_ranks_leave_after_the_newest_save_that_any_rank_has_begun() -> None:
    ranks = FakeRanks()
    agreement = RankAgreement(ranks.call)
    await agreement.save(7)
    assert ranks.limits["leave_after"] == (2,)
    await agreement.call_off_save(7)
    assert ranks.limits["leave_after"] == (None,)
