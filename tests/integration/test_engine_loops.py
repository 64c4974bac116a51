"""Loops that do something unusual train to the weights of the plain loop under any strategy, or are refused.

``RAYSGD_LOOPS`` is the number of loops that are drawn, ``RAYSGD_LOOPS_SEED`` their seed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from support import loop_edits
from support.torch_ranks import RankGroup

pytestmark = pytest.mark.timeout(300)

#: Loops that are drawn: 50 take some seconds. A nightly run takes 1000.
NUM_LOOPS = int(os.environ.get("RAYSGD_LOOPS", 50))
SEED = int(os.environ.get("RAYSGD_LOOPS_SEED", random.randrange(10**6)))


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
