"""Calls of train() in one run: what is given to the workers, and when they save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raysgd.errors import RunCancelledError
from raysgd.functions import runs
from raysgd.functions.runs import TrainingByEpochs
from raysgd.workers.pickling import loads


class Stream:
    """Stands for the stream of a run that trains each epoch in two steps."""

    def __init__(self, results: list[dict[str, Any]] | None = None) -> None:
        self.given: list[tuple[int, Any, int]] = []
        self._results = results

    def give(self, number: int, piece: Any, kept_from: int) -> None:
        self.given.append((number, loads(piece), kept_from))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._results is not None:
            yield from self._results
            return
        epoch = self.given[-1][0]
        yield {"epoch": epoch - 1, "step": 2 * epoch, "train_loss": 9.0}  # again, after a worker's death
        yield {"epoch": epoch, "step": 2 * epoch + 1, "loss": 1.0, "compilations": 1}
        yield {"epoch": epoch, "step": 2 * epoch + 2, "loss": 1.0}
        yield {"epoch": epoch, "step": 2 * epoch + 2, "train_loss": 1.0, "timestamp": 5.0}

    def get_returns(self) -> str:
        return "returned"


def test_each_call_gives_an_epoch_and_returns_its_metrics_and_compilations() -> None:
    stream: Any = Stream()
    found: list[Any] = []
    live = TrainingByEpochs(stream, "this", (3, 6), found.append)
    assert live.train(["a"]) == ({"epoch": 3, "step": 8, "train_loss": 1.0}, 1)
    assert live.train(["b"])[0]["epoch"] == 4
    live.end()
    assert stream.given == [(3, (["a"], False), 3), (4, (["b"], False), 3), (5, (None, False), 3)]
    assert found == ["returned"]


@pytest.mark.parametrize(("every_s", "every_epochs"), [(1e9, 4), (-1.0, 1)])
def test_workers_save_now_and_then_and_epochs_are_kept_from_the_newest_but_one_on(
    monkeypatch: pytest.MonkeyPatch, every_s: float, every_epochs: int
) -> None:
    monkeypatch.setattr(runs, "_SAVE_EVERY_S", every_s)
    monkeypatch.setattr(runs, "_SAVE_EVERY_EPOCHS", every_epochs if every_s > 0 else 10**9)
    stream: Any = Stream()
    live = TrainingByEpochs(stream, "this", (0, 0), lambda found: None)
    for _ in range(12):
        live.train([])
    saves = [number for number, (_, is_saved), _ in stream.given if is_saved]
    assert saves == (list(range(12)) if every_epochs == 1 else [4, 9])
    for number, _, kept_from in stream.given:
        earlier = [each for each in saves if each < number]
        assert kept_from == (earlier[-2] + 1 if len(earlier) > 1 else 0)


def test_run_that_ends_before_its_epoch_is_an_error() -> None:
    stream: Any = Stream([{"epoch": 0, "step": 1, "loss": 1.0}])
    with pytest.raises(RunCancelledError, match=r"ended before its epoch: call train\(\) again"):
        TrainingByEpochs(stream, "this", (0, 0), lambda found: None).train([])
