"""One, two and three workers compute the same, whatever collate_fn makes of a row with the help of the other ones.

The workers are simulated: each makes its batches by itself, and one device of this process holds the rows of each.
"""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raysgd
from raysgd.errors import ConfigError

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
backends = pytest.importorskip("jax.extend").backend
pytestmark = pytest.mark.jax

from raysgd.functions.examples import Examples  # noqa: E402
from raysgd.functions.sharding import plan_sharding  # noqa: E402
from raysgd.functions.worker import batches as batches_module  # noqa: E402
from raysgd.functions.worker.batches import Agreement, ExampleBatches, HostBatch  # noqa: E402
from raysgd.functions.worker.evaluation import compute_loss, predict  # noqa: E402
from raysgd.functions.worker.steps import Steps  # noqa: E402

PARAMS = {"table": np.random.default_rng(0).normal(0, 0.3, (9, 2)).astype(np.float32)}
ROWS = 6  # of a batch, on all devices


@pytest.fixture(scope="module", autouse=True)
def three_devices() -> Iterator[None]:
    before = jax.config.jax_num_cpu_devices
    backends.clear_backends()
    jax.config.update("jax_num_cpu_devices", 3)
    yield
    backends.clear_backends()
    jax.config.update("jax_num_cpu_devices", before)


class Worker:
    """Stands for the steps of one of several workers."""

    def __init__(self, rank: int, num_workers: int) -> None:
        self._rank = rank
        self._num_workers = num_workers

    def local_rows(self, num_rows: int) -> slice:
        if num_rows % self._num_workers:
            return slice(0, num_rows)
        size = num_rows // self._num_workers
        return slice(self._rank * size, (self._rank + 1) * size)


class Workers:
    """A training on one device of each worker, by batches that each worker makes by itself."""

    def __init__(self, number: int, collate_fn: Callable[..., Any], examples: list[Any]) -> None:
        self._number = number
        self._collate_fn = collate_fn
        self._examples = Examples(examples)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:number]).reshape(-1, 1), ("data", "model"))
        functions = {"loss_fn": loss_fn, "pred_fn": pred_fn, "optimizer": optax.sgd(0.1)}
        self._steps = Steps(mesh, plan_sharding(PARAMS, mesh.shape), **functions)

    def train(self) -> tuple[list[float], Any, float, list[Any]]:
        state = self._steps.make_state(PARAMS, 0)
        losses = []
        for batch in self.batches(shuffle=True):
            placed = self._steps.place_batch(batch.arrays, batch.num_rows, batch.rows)
            state, metrics = self._steps.train(state, placed)
            losses.append(float(metrics["loss"]))
        loss = compute_loss(self._steps, state, self.batches())
        found = predict(self._steps, state.params, self.batches(pads=True), None, seed=0, is_first_rank=True)
        return losses, state.params, loss, found.outputs

    def batches(self, **kind: bool) -> list[HostBatch]:
        of_ranks = []
        for rank in range(self._number):
            with raysgd.local(dataset=self._examples):
                worker: Any = Worker(rank, self._number)
                dataset = raysgd.get_dataset()
                of_ranks.append(list(ExampleBatches(dataset, self._collate_fn, worker, ROWS, seed=3, **kind)))
        return [self._joined(each) for each in zip(*of_ranks, strict=True)]

    def _joined(self, of_ranks: tuple[HostBatch, ...]) -> HostBatch:
        """Return the batch that the devices hold: from each worker the rows that it needs."""
        first = of_ranks[0]
        used = [Worker(rank, self._number).local_rows(first.num_rows) for rank in range(self._number)]
        if used[-1].start == 0:  # every worker holds all rows, and must hold the same
            for each in of_ranks:
                jax.tree.map(np.testing.assert_array_equal, each.arrays, first.arrays)
            return first
        parts = []
        for each, rows in zip(of_ranks, used, strict=True):
            own = slice(rows.start - each.rows.start, rows.stop - each.rows.start)
            parts.append(jax.tree.map(lambda array, own=own: array[own], each.arrays))
        arrays = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        return HostBatch(first.refs, first.num_rows, first.full_rows, arrays, slice(0, first.num_rows), "")


def loss_fn(rng: Any, state: Any, params: Any, batch: Any, is_training: bool) -> Any:
    noise = jax.random.normal(rng, batch["y"].shape) if is_training else 0.0
    out = params["table"][batch.pop("ids")].sum((1, 2))
    return ((out + noise - batch["y"]) ** 2).mean()


def pred_fn(rng: Any, params: Any, batch: Any) -> Any:
    return params["table"][batch["ids"]].sum(-1)


def pad_to_longest(examples: list[Any]) -> list[list[int]]:
    width = max(len(each["ids"]) for each in examples)
    return [each["ids"] + [8] * (width - len(each["ids"])) for each in examples]


def pad_to_a_multiple(examples: list[Any]) -> list[list[int]]:
    return [row + [8] * (-len(row) % 4) for row in pad_to_longest(examples)]


def cut_to_shortest(examples: list[Any]) -> list[list[int]]:
    return [each["ids"][: min(len(other["ids"]) for other in examples)] for each in examples]


def plain(examples: list[Any]) -> Any:
    return np.array([each["y"] for each in examples], np.float32)


def less_the_mean(examples: list[Any]) -> Any:
    return plain(examples) - plain(examples).mean()


def of_the_values_type(examples: list[Any]) -> Any:
    return np.array([int(each["y"]) if each["y"] == int(each["y"]) else each["y"] for each in examples])


def with_noise(examples: list[Any]) -> Any:
    return plain(examples) + np.random.random(len(examples)).astype(np.float32) + random.random()


def in_order_of_rank(examples: list[Any]) -> Any:
    return np.argsort(np.argsort(plain(examples))).astype(np.float32)


EXAMPLE = st.fixed_dictionaries(
    {"ids": st.lists(st.integers(0, 7), min_size=1, max_size=9), "y": st.sampled_from([0.0, 1.0, 2.5, -3.0])}
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(EXAMPLE, min_size=1, max_size=14),
    st.sampled_from([pad_to_longest, pad_to_a_multiple, cut_to_shortest]),
    st.sampled_from([plain, less_the_mean, of_the_values_type, with_noise, in_order_of_rank]),
    st.booleans(),
    st.sampled_from([{}, {"shuffle": True}, {"pads": True}]),
)
def test_batches_on_the_devices_do_not_depend_on_the_number_of_workers(
    examples: list[Any], ids_of: Any, y_of: Any, has_optional: bool, kind: dict[str, bool]
) -> None:
    def collate_fn(examples: list[Any]) -> Any:
        made: dict[str, Any] = {"ids": np.array(ids_of(examples)), "y": y_of(examples)}
        if has_optional:  # an array that is there if a row has something for it
            made["optional"] = plain(examples) if any(each["y"] == 2.5 for each in examples) else None
        return UserDict(made)

    expected = [batch.arrays for batch in Workers(1, collate_fn, examples).batches(**kind)]
    for number in (2, 3):
        found = [batch.arrays for batch in Workers(number, collate_fn, examples).batches(**kind)]
        jax.tree.map(assert_same, found, expected)


def assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype


@pytest.mark.parametrize(("ids_of", "y_of"), [(pad_to_longest, of_the_values_type), (cut_to_shortest, with_noise)])
def test_losses_weights_and_predictions_do_not_depend_on_the_number_of_workers(ids_of: Any, y_of: Any) -> None:
    lengths = [1, 1, 7, 2, 5, 1, 3, 3, 9, 1, 2, 2, 4]
    examples = [{"ids": [*range(length % 8), length % 3], "y": length / 2} for length in lengths]

    def collate_fn(examples: list[Any]) -> Any:
        return UserDict(ids=np.array(ids_of(examples)), y=y_of(examples))

    expected = Workers(1, collate_fn, examples).train()
    for number in (2, 3):
        found = Workers(number, collate_fn, examples).train()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_worker_collates_its_own_rows_if_it_is_to() -> None:
    examples, seen = [{"x": float(row)} for row in range(8)], []

    def collate_fn(examples: list[Any]) -> Any:
        seen.append([each["x"] for each in examples])
        return {"x": np.zeros((len(examples), len(examples)) if len(seen) > 2 else (len(examples), 3))}

    with raysgd.local(dataset=Examples(examples)):
        worker: Any = Worker(1, 2)
        made = iter(ExampleBatches(raysgd.get_dataset(), collate_fn, worker, 2, seed=3, per_worker=True))
        first, _ = next(made), next(made)
        assert seen[:2] == [[1.0], [3.0]]
        assert (first.num_rows, first.rows) == (2, slice(1, 2))
        with pytest.raises(ConfigError, match=r"the same in each batch: pad to a fixed length"):
            list(made)


@pytest.mark.parametrize("number", [1, 2, 3, 7, 20])
def test_different_batches_of_two_ranks_are_found_when_the_data_ends_at_the_latest(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanged: list[Any] = []
    monkeypatch.setattr(batches_module.api, "world_size", lambda: 2)
    monkeypatch.setattr(batches_module.api, "gather", lambda mine: [mine, exchanged.pop(0)])

    def run(signatures: list[str]) -> None:
        agreement = Agreement()
        for each in signatures:
            agreement.add(each)
        agreement.check()

    def record(mine: Any) -> list[Any]:
        exchanged.append(mine)
        return [mine, mine]

    with monkeypatch.context() as recording:
        recording.setattr(batches_module.api, "gather", record)
        run(["['x'] (5,) float32"] * number)
    same = list(exchanged)
    run(["['x'] (5,) float32"] * number)
    assert not exchanged  # the ranks exchange equally often
    exchanged[:] = same
    with pytest.raises(
        ConfigError, match=r"collate_fn returned other arrays on rank 1 .*\['x'\] \(5,\).*\['x'\] \(7,\)"
    ):
        run(["['x'] (5,) float32"] * (number - 1) + ["['x'] (7,) float32"])
