"""Loops that do something unusual train to the weights of the plain loop under any strategy, or are refused.

``RAYSGD_LOOPS`` is the number of loops that are drawn, ``RAYSGD_LOOPS_SEED`` their seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support import loop_edits
from support.torch_ranks import RankGroup

pytestmark = pytest.mark.timeout(300)

#: Loops that are drawn: the gate takes 50, `make nightly` 1000 with another seed.
NUM_LOOPS = int(os.environ.get("RAYSGD_LOOPS", 50))
SEED = int(os.environ.get("RAYSGD_LOOPS_SEED", 1))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    with RankGroup(loop_edits.RANKS) as group:
        yield group


@pytest.mark.timeout(300 + NUM_LOOPS)
def test_loops_train_to_the_weights_of_the_plain_loop_or_are_refused(ranks: RankGroup) -> None:
    loops = [loop_edits.draw(SEED + number) for number in range(NUM_LOOPS)]
    of_ranks = ranks.run(loop_edits.compare, loops)
    wrong = []
    for loop, *outcomes in zip(loops, *of_ranks, strict=True):
        for outcome in outcomes:
            is_refused = isinstance(outcome, str)
            if is_refused != loop_edits.is_refused(loop.strategy, loop.edit) or (
                not isinstance(outcome, str) and not outcome < loop.tolerance
            ):
                wrong.append(f"{loop}: {outcome}")
    assert not wrong, f"RAYSGD_LOOPS_SEED={SEED}\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("strategy", "edit"),
    [("DDP", "unused"), ("DDP", "branch per rank"), ("accelerate", "branch per step"), ("ZeRO 3", "branch per step")],
)
def test_layers_that_are_left_out_are_refused_without_the_setting(ranks: RankGroup, strategy: str, edit: str) -> None:
    for (outcome,) in ranks.run(loop_edits.compare, [loop_edits.Loop(strategy, edit, 1, 3, finds_unused=False)]):
        assert isinstance(outcome, str) and "Engine(find_unused_parameters=True)" in outcome


def test_zero_1_and_2_need_no_setting_for_layers_that_are_left_out(ranks: RankGroup) -> None:
    loops = [
        loop_edits.Loop(strategy, edit, 2, 3, finds_unused=False)
        for strategy in ("ZeRO 1", "ZeRO 2")
        for edit in ("unused", "branch per step", "branch per rank")
    ]
    for outcomes in ranks.run(loop_edits.compare, loops):
        assert all(isinstance(one, float) and one < 2e-5 for one in outcomes), outcomes
