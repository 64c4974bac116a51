"""Loops of several habits train as the plain loop does under any strategy, or are refused before they train to something else.

``RAYSGD_LOOPS`` is the number of loops that are drawn, ``RAYSGD_LOOPS_SEED`` their first seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support.loop_runs import Loop, draw
from support.loop_verdicts import Judge

pytestmark = pytest.mark.timeout(300)

#: Loops that are drawn: the gate takes 50, `make loops` 2000 with another seed.
NUM_LOOPS = int(os.environ.get("RAYSGD_LOOPS", 50))
SEED = int(os.environ.get("RAYSGD_LOOPS_SEED", 1))


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge() as judge:
        yield judge


@pytest.mark.timeout(300 + 4 * NUM_LOOPS)
def test_loops_train_to_the_weights_of_the_plain_loop_or_are_refused(judge: Judge) -> None:
    drawn = [draw(SEED + number) for number in range(NUM_LOOPS)]
    wrong = judge.find_wrong(drawn)
    assert not wrong, f"{len(wrong)} loops, RAYSGD_LOOPS_SEED={SEED}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("habits", "strategies"),
    [
        (("ReduceLROnPlateau of losses",), ("DDP", "fp16, ZeRO 2", "ZeRO 3", "accelerate")),
        (("second optimizer",), ("DDP", "fp16", "ZeRO 2", "ZeRO 3", "bf16-true", "tensor parallel")),
        (("add layer", "clip norm"), ("ZeRO 3", "tensor parallel")),
        (("exchange data",), ("ZeRO 2", "ZeRO 3", "tensor parallel")),
        (("evaluate a part",), ("bf16-true", "ZeRO 3", "tensor parallel")),
        (("EMA",), ("ZeRO 3", "bf16-true", "bf16-true, ZeRO 1")),
        (("gradient penalty",), ("DDP", "ZeRO 3", "tensor parallel", "accelerate, ZeRO 3")),
        (("unfreeze",), ("bf16, ZeRO 3", "bf16-true, ZeRO 3")),
        (("freeze", "zeros"), ("DDP", "ZeRO 2", "ZeRO 3", "bf16-true", "tensor parallel")),
        (("two losses", "unused"), ("ZeRO 3", "accelerate, ZeRO 3")),
        (("resume at a step",), ("accelerate, ZeRO 2", "accelerate, ZeRO 3")),
        (("resume on two ranks",), ("accelerate, ZeRO 2",)),
    ],
    ids=lambda each: "-".join(each).replace(" ", "_"),
)
def test_habit_trains_as_in_the_plain_loop_or_is_refused(
    judge: Judge, habits: tuple[str, ...], strategies: tuple[str, ...]
) -> None:
    assert not judge.find_wrong([Loop(strategy, habits, 1, 3) for strategy in strategies])


@pytest.mark.parametrize(
    ("habits", "accumulation", "seed"),
    [(("kept gradients",), 2, 1), (("kept gradients", "resume"), 3, 11)],
    ids=["whole", "resumed within the step"],
)
def test_gradients_that_are_kept_count_once_in_a_last_step_of_fewer_batches(
    judge: Judge, habits: tuple[str, ...], accumulation: int, seed: int
) -> None:
    strategies = ("DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3", "fp16, ZeRO 2", "tensor parallel")
    assert not judge.find_wrong([Loop(strategy, habits, accumulation, seed) for strategy in strategies])


@pytest.mark.parametrize(
    ("strategy", "habit"),
    [("DDP", "unused"), ("DDP", "branch per rank"), ("accelerate", "branch per step"), ("ZeRO 3", "branch per step")],
)
def test_layers_that_are_left_out_are_refused_without_the_setting(judge: Judge, strategy: str, habit: str) -> None:
    (wrong,) = judge.find_wrong([Loop(strategy, (habit,), 1, 3, has_settings=False)])
    assert "refused" in wrong and "Engine(find_unused_parameters=True)" in wrong


def test_zero_1_and_2_need_no_setting_for_layers_that_are_left_out(judge: Judge) -> None:
    loops = [
        Loop(strategy, (habit,), 2, 3, has_settings=False)
        for strategy in ("ZeRO 1", "ZeRO 2")
        for habit in ("unused", "branch per step", "branch per rank")
    ]
    assert not judge.find_wrong(loops)
