"""Which collectives may have carried a model, and which ranks have trained without any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raysgd.backends.torch_exchange import ExchangeWatch, may_carry_model

STEP_NS = 2000


def entry(*sizes: list[int], name: str = "gloo:all_reduce", at_ns: int = STEP_NS + 1, **changes: Any) -> dict[str, Any]:
    return {
        "input_sizes": list(sizes),
        "profiling_name": name,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 1,
        "retired": True,
        "is_p2p": False,
        "time_created_ns": at_ns,
        **changes,
    }


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        (entry([1000]), True),
        (entry([1000], at_ns=1), True),
        (entry([]), False),
        (entry([1]), False),
        (entry([8]), False),
        (entry([100], [20, 20]), True),
        (entry([32], name="gloo:all_gather"), True),
        (entry([1], is_p2p=True), True),
        (entry([1000], name="gloo:broadcast", at_ns=1), False),
        (entry([1000], name="nccl:_broadcast_oop", at_ns=1), False),
        (entry([1000], name="gloo:broadcast"), True),
    ],
)
def test_large_collectives_may_carry_a_model_with_a_thousand_weights(recorded: dict[str, Any], expected: bool) -> None:
    assert may_carry_model(recorded, 1000, STEP_NS) is expected


def test_collective_of_one_number_carries_the_smallest_model_only() -> None:
    assert may_carry_model(entry([1]), 1, STEP_NS)
    assert not may_carry_model(entry([]), 2, STEP_NS)
    assert may_carry_model(entry([2, 1]), 2, STEP_NS)


LATE_NS = 2**62


class Recorder:
    """A flight recorder whose entries the test gives."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.num_read = 0
        self.num_sent = 0

    def count(self) -> dict[str, int]:
        """Return the number of the group, which counts sends as well."""
        late = [each for each in self.entries if each["time_created_ns"] == LATE_NS]
        return {"default_pg": len(late) + self.num_sent}

    def read(self) -> list[dict[str, Any]]:
        self.num_read += 1
        return [{"entries": self.entries}]


@pytest.fixture
def watch() -> Iterator[ExchangeWatch]:
    watch = ExchangeWatch()
    yield watch
    watch.close()


def step() -> None:
    """Make one step of an optimizer over a layer of eight by eight."""
    layer = torch.nn.Linear(8, 8)
    layer(torch.ones(1, 8)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def test_step_without_collective_is_training_alone(watch: ExchangeWatch) -> None:
    recorder = Recorder()
    step()
    assert watch.has_trained_alone(recorder.read, recorder.count)
    recorder.entries.append(entry([64], at_ns=1))  # of an earlier attempt
    recorder.entries.append(entry([1], at_ns=LATE_NS))
    assert watch.has_trained_alone(recorder.read, recorder.count)


def test_exchange_is_remembered_when_the_recorder_has_forgotten_it(watch: ExchangeWatch) -> None:
    recorder = Recorder()
    recorder.entries.append(entry([72], at_ns=LATE_NS))
    step()
    assert not watch.has_trained_alone(recorder.read, recorder.count)
    recorder.entries.clear()
    assert not watch.has_trained_alone(recorder.read, recorder.count) and recorder.num_read == 1


def test_sends_that_are_not_recorded_may_carry_a_model(watch: ExchangeWatch) -> None:
    """As gloo's, between the stages of a pipeline."""
    recorder = Recorder()
    step()
    recorder.entries.append(entry([1], at_ns=LATE_NS))
    assert watch.has_trained_alone(recorder.read, recorder.count)
    recorder.num_sent = 2
    assert not watch.has_trained_alone(recorder.read, recorder.count)


def test_inference_is_not_training(watch: ExchangeWatch) -> None:
    torch.nn.Linear(8, 8)(torch.ones(1, 8))
    recorder = Recorder()
    assert not watch.has_trained_alone(recorder.read, recorder.count) and recorder.num_read == 0


@pytest.mark.parametrize("variable", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_without_a_recorder_nothing_is_known(
    watch: ExchangeWatch, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    step()
    assert not watch.has_trained_alone(list, dict)  # an older torch
    monkeypatch.setenv(variable, "0")
    assert not watch.has_trained_alone(Recorder().read, dict)


def test_closed_watch_does_not_see_steps() -> None:
    watch = ExchangeWatch()
    watch.close()
    step()
    assert not watch.has_trained_alone(Recorder().read, dict)
