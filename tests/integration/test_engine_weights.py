"""Loops that change weights, layers or the optimizer outside of its step train as the plain loop does, or are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import weight_edits
from support.torch_ranks import RankGroup

pytestmark = pytest.mark.timeout(300)

SHARDED = ("ZeRO 3", "bf16-true, ZeRO 3", "accelerate, ZeRO 3")
WITH_MASTERS = ("bf16-true", "bf16-true, ZeRO 1", "TP, bf16-true")
WITH_TENSORS = ("TP", "TP, bf16-true")
#: What is refused, by edit: the strategies, and what the error says.
REFUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "swap_tensors": {"Cannot swap t1": ("DDP", "bf16-true")},  # torch's own
    "set_": {"aten.set_.source_Tensor does not have a sharding strategy": (*SHARDED, *WITH_TENSORS)},  # torch's own
    "exchange": {
        "give Engine(find_unused_parameters=True)": (SHARDED[0], SHARDED[2]),
        "layer.to(torch.bfloat16)": (SHARDED[1],),
    },
    "tie": {"frozen.weight was replaced by another one": SHARDED},
    "parametrize": {
        "middle.weight was replaced by another one": SHARDED,
        "poisoned by swap_tensors": WITH_TENSORS,  # torch's own
    },
    "round": {"convert the model before engine.compose": SHARDED, "or convert the model before it": WITH_MASTERS},
    "step of the given optimizer": {"Call step() on the optimizer that was returned": tuple(weight_edits.STRATEGIES)},
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankGroup]:
    with RankGroup(weight_edits.RANKS) as group:
        yield group


@pytest.mark.parametrize("edit", weight_edits.EDITS)
def test_what_the_loop_does_to_weights_and_optimizer_wins(ranks: RankGroup, edit: str) -> None:
    cases = [
        (strategy, edit, 3, accumulation)
        for strategy, (_, is_accelerated) in weight_edits.STRATEGIES.items()
        for accumulation in ((1,) if is_accelerated or edit == "SAM" else (1, 2))
    ]
    refusals = {name: text for text, names in REFUSED.get(edit, {}).items() for name in names}
    wrong = []
    for (strategy, *_), *outcomes in zip(cases, *ranks.run(weight_edits.compare, cases), strict=True):
        precision = weight_edits.STRATEGIES[strategy][0].get("precision", "fp32")
        for outcome in outcomes:
            if isinstance(outcome, str):
                is_right = strategy in refusals and refusals[strategy] in outcome
            else:
                is_right = strategy not in refusals and outcome < weight_edits.TOLERANCES[precision]
            if not is_right:
                wrong.append(f"{strategy}: {outcome}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("strategy", ["DDP", "ZeRO 1", "bf16-true", "accelerate, ZeRO 2"])
def test_optimizer_that_makes_steps_itself_needs_complete_clipped_gradients(ranks: RankGroup, strategy: str) -> None:
    (clipped,) = set(ranks.run(weight_edits.train, strategy, "SAM", 3, 1, clip_grad_norm=1.0))
    assert "optimizer.second_step() makes a step by itself, and clip_grad_norm= clips in optimizer.step()" in clipped
    if "accelerate" not in strategy:
        (unfinished,) = set(ranks.run(weight_edits.train, strategy, "SAM", 3, 2))
        assert "step() needs the gradients of a step" in unfinished
