"""A checkpoint that is saved between two batches of a step: the resumed training makes the same steps, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import unfinished_steps
from support.torch_ranks import RankGroup
from support.unfinished_steps import SAVED_AFTER, STRATEGIES

pytestmark = pytest.mark.timeout(300)

#: Of weights in fp32, which differ by rounding where gradients are added up in another order.
ATOL = 1e-5


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    with RankGroup(2) as group:
        yield group


@pytest.fixture(scope="module")
def alone() -> Iterator[RankGroup]:
    with RankGroup(1) as group:
        yield group


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_that_a_checkpoint_was_saved_in_is_finished_to_the_same_bits(
    ranks: RankGroup, tmp_path: Path, strategy: str
) -> None:
    branches = strategy not in (
        "DDP",
        "fp16",
        "bf16 weights",
        "weighted",
        "ZeRO 3",
    )  # these need the setting for unused layers
    whole = ranks.run(unfinished_steps.train_on_ranks, strategy, str(tmp_path), branches=branches)
    resumed = ranks.run(unfinished_steps.train_on_ranks, strategy, str(tmp_path), first=SAVED_AFTER, branches=branches)
    assert whole[0] == whole[1] and all(map(math.isfinite, whole[0]))
    assert resumed == whole


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("DDP", "ZeRO 2"),
        ("ZeRO 1", "DDP"),
        ("ZeRO 2", "ZeRO 3"),
        ("ZeRO 3", "ZeRO 1"),
        ("weighted", "weighted, ZeRO 2"),
    ],
)
def test_step_is_finished_under_other_strategies_and_on_another_number_of_ranks(
    ranks: RankGroup, alone: RankGroup, tmp_path: Path, saved: str, resumed: str
) -> None:
    whole, _ = ranks.run(unfinished_steps.train_on_ranks, saved, str(tmp_path))
    for found in ranks.run(unfinished_steps.train_on_ranks, resumed, str(tmp_path), first=SAVED_AFTER):
        assert found == pytest.approx(whole, abs=ATOL)
    if "weighted" in saved:  # else a rank's mean counts as much as another's, however many rows they have
        (found,) = alone.run(unfinished_steps.train_on_ranks, resumed, str(tmp_path), first=SAVED_AFTER)
        assert found == pytest.approx(whole, abs=ATOL)
