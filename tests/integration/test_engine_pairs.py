"""Two models with an engine each train as in the plain loop, also if the loss of one leaves gradients at the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import engine_pairs
from support.torch_ranks import RankGroup

STRATEGIES: list[dict[str, Any]] = [
    {},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"precision": "fp16", "loss_scale": 64.0},
    {"precision": "bf16-true"},
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    with RankGroup(2) as group:
        yield group


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("strategies", STRATEGIES, ids=str)
def test_gan_trains_as_in_the_plain_loop(ranks: RankGroup, strategies: dict[str, Any], accumulation: int) -> None:
    expected = engine_pairs.train_plainly(is_cleared=True, accumulation=accumulation)
    for found in ranks.run(engine_pairs.train, is_cleared=True, accumulation_steps=accumulation, **strategies):
        assert found == pytest.approx(expected, abs=_tolerance(strategies))


@pytest.mark.parametrize("strategies", STRATEGIES, ids=str)
def test_gradients_of_another_loss_count_as_in_the_plain_loop_or_are_refused(
    ranks: RankGroup, strategies: dict[str, Any]
) -> None:
    expected = engine_pairs.train_plainly(is_cleared=False, accumulation=1)
    for found in ranks.run(engine_pairs.train, is_cleared=False, **strategies):
        if strategies.get("zero_stage") in (1, 2):
            assert "another model's loss" in found
            assert "optimizer.zero_grad()" in found
        else:
            assert found == pytest.approx(expected, abs=_tolerance(strategies))


def _tolerance(strategies: dict[str, Any]) -> float:
    return {"fp16": 2e-3, "bf16-true": 2e-2}.get(strategies.get("precision", ""), 1e-5)
