"""A checkpoint leaves out the batches of a dataset that the loop has read ahead: each row is trained on once."""

from __future__ import annotations

import copy
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import raysgd
from raysgd.errors import ConfigError, UsageError

ROWS, SIZE, EPOCHS = 22, 4, 2  # six batches, the last one of two rows
DATA = {"x": np.arange(ROWS, dtype=np.float32)[:, None]}


def plain(batches: Iterable[Any]) -> Iterator[Any]:
    return iter(batches)


def ahead_by(num_batches: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def read(batches: Iterable[Any]) -> Iterator[Any]:
        source = iter(batches)
        waiting = deque(islice(source, num_batches))
        while waiting:
            waiting.extend(islice(source, 1))
            yield waiting.popleft()

    return read


def by_a_thread(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches that a thread of the loop reads ahead."""
    waiting: queue.Queue[Any] = queue.Queue(maxsize=2)

    def read() -> None:
        for batch in batches:
            waiting.put(batch)
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := waiting.get()) is not None:
        yield batch


def in_groups_of(num_batches: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def read(batches: Iterable[Any]) -> Iterator[Any]:
        source = iter(batches)
        while group := list(islice(source, num_batches)):
            yield from group

    return read


def kept(batches: Iterable[Any]) -> Iterator[Any]:
    history = []
    for batch in batches:
        history.append(batch)
        yield batch


READERS = {
    "plain": plain,
    "one ahead": ahead_by(1),
    "three ahead": ahead_by(3),
    "in groups": in_groups_of(3),
    "by a thread": by_a_thread,
    "kept": kept,
    "a list": list,
}


def as_given(x: torch.Tensor) -> torch.Tensor:
    return x


def as_a_part(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1]


def changed(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


class Loop:
    """A training of two epochs over a dataset, left and resumed as often as wanted."""

    def __init__(self, folder: Path, reads: Callable[[Any], Iterable[Any]], change: Any, kind: str, model: Any) -> None:
        self.folder, self.reads, self.change, self.kind, self.make_model = folder, reads, change, kind, model
        self.rows: list[float] = []

    def train(self, leave_after: int | None = None) -> None:
        with raysgd.local(dataset=DATA, dir=self.folder):
            step, save = self.make_model()
            shard = raysgd.get_dataset().get_split()
            batches: Any = shard.to_torch(SIZE, shuffle="full")
            if self.kind == "numpy":
                batches = shard.iter_batches(SIZE, shuffle="full")
            left = leave_after
            while batches.epoch < EPOCHS:
                for batch in self.reads(batches):
                    x = torch.from_numpy(batch["x"]) if self.kind == "numpy" else batch["x"]
                    step(self.change(x))
                    self.rows += x[:, 0].tolist()
                    save()
                    left = None if left is None else left - 1
                    if left == 0:
                        return


#: What a loop calls with a batch, and what it calls to save.
Calls = tuple[Callable[[torch.Tensor], None], Callable[[], None]]


def prepared() -> Calls:
    raysgd.load_checkpoint()
    model = raysgd.torch.prepare_model(nn.Linear(1, 1))
    return lambda x: model(x).sum().backward(), lambda: raysgd.save_checkpoint({"model": model})


def composed() -> Calls:
    model = nn.Linear(1, 1)
    engine = raysgd.Engine(accumulation_steps=2)
    model, optimizer, *_ = engine.compose(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    engine.load_checkpoint()

    def step(x: torch.Tensor) -> None:
        engine.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()

    return step, engine.save_checkpoint


def of_two_models() -> Calls:
    raysgd.load_checkpoint()
    model, other = (raysgd.torch.prepare_model(nn.Linear(1, 1)) for _ in range(2))

    def step(x: torch.Tensor) -> None:
        model(other(torch.randn(3, 1))).sum().backward()
        model(x).sum().backward()
        other(torch.randn(3, 1)).sum().backward()
        with torch.no_grad():
            model(x + 1)

    return step, lambda: raysgd.save_checkpoint({"models": [model, other]})


MODELS = {"prepared": prepared, "composed": composed, "two models": of_two_models}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_each_row_is_trained_on_once_or_the_save_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reads = data.draw(st.sampled_from(sorted(READERS)), "reads")
    change = data.draw(st.sampled_from([as_given, as_a_part, changed]), "change")
    kind = data.draw(st.sampled_from(["torch", "numpy"]), "kind")
    model = "prepared" if change is changed else data.draw(st.sampled_from(sorted(MODELS)), "model")
    lives = data.draw(st.lists(st.integers(1, 7), max_size=3), "steps of each start")
    loop = Loop(tmp_path_factory.mktemp("run"), READERS[reads], change, kind, MODELS[model])
    is_refused = False
    for steps in [*lives, None]:
        try:
            loop.train(steps)
        except UsageError:
            is_refused = True
            break
    assert not is_refused or change is changed or reads == "a list"
    if not is_refused:
        assert sorted(loop.rows) == sorted([*range(ROWS)] * EPOCHS)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("model", ["prepared", "composed"])
def test_batch_that_was_read_ahead_comes_again(model: str, kind: str, tmp_path: Path) -> None:
    loop = Loop(tmp_path, READERS["one ahead"], as_given, kind, MODELS[model])
    loop.train(3)
    loop.train()
    assert sorted(loop.rows) == sorted([*range(ROWS)] * EPOCHS)


def test_batch_that_the_loop_leaves_out_counts() -> None:
    with raysgd.local(dataset=DATA):
        dataset, (step, _) = raysgd.get_dataset(), prepared()
        for number, batch in enumerate(dataset.get_split().to_torch(SIZE)):
            if number == 1:
                assert dataset.position.consumed == 8
                continue
            step(batch["x"])
            assert dataset.position.consumed == min(SIZE * (number + 1), ROWS)


def test_changed_tensors_of_a_loop_that_reads_ahead_are_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path, READERS["one ahead"], changed, "torch", prepared)
    with pytest.raises(UsageError, match=r"read batches of dataset .* ahead, and called the model with other tensors"):
        loop.train(1)


def test_all_batches_read_first_are_refused_at_a_save_between_them(tmp_path: Path) -> None:
    loop = Loop(tmp_path, list, as_given, "torch", prepared)
    with pytest.raises(UsageError, match="has read all batches of dataset"):
        loop.train(1)


def test_data_that_is_kept_for_all_epochs_is_read_whole_at_each_start(tmp_path: Path) -> None:
    for _ in range(2):
        with raysgd.local(dataset=DATA, dir=tmp_path):
            shard, (step, save) = raysgd.get_dataset().get_split(), prepared()
            batches = list(shard.to_torch(SIZE))
            assert sum(len(batch["x"]) for batch in batches) == ROWS
            shard.set_read_ahead(0)
            for batch in batches[:3]:
                step(batch["x"])
                save()


def test_epoch_that_is_read_for_its_statistics_does_not_matter_later(tmp_path: Path) -> None:
    with raysgd.local(dataset=DATA, dir=tmp_path):
        step, save = prepared()
        dataset = raysgd.get_dataset()
        batches = dataset.get_split().to_torch(SIZE)
        assert sum(batch["x"].sum().item() for batch in batches) == DATA["x"].sum()
        for number, batch in enumerate(READERS["one ahead"](batches), 1):
            step(batch["x"])
            save()
            assert (dataset.position.epoch, dataset.position.consumed) == ((1, SIZE * number) if number < 6 else (2, 0))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_loop_states_how_far_it_has_read_ahead(depth: int, tmp_path: Path) -> None:
    rows: list[float] = []
    for leave_after in (3, 2, None):
        with raysgd.local(dataset=DATA, dir=tmp_path):
            raysgd.load_checkpoint()
            shard = raysgd.get_dataset().get_split()
            batches = iter(shard.iter_batches(SIZE, shuffle="full"))
            ahead, steps = deque(islice(batches, depth)), 0
            while ahead:
                rows += ahead.popleft()["x"][:, 0].tolist()  # as a function of JAX, which nobody sees
                shard.set_read_ahead(len(ahead))
                raysgd.save_checkpoint({})
                ahead.extend(islice(batches, 1))
                steps += 1
                if steps == leave_after:
                    break
    assert sorted(rows) == [*range(ROWS)]


def test_more_batches_than_were_handed_out_cannot_be_left_out() -> None:
    with raysgd.local(dataset=DATA):
        shard = raysgd.get_dataset().get_split()
        batches = iter(shard.iter_batches(SIZE))
        next(batches)
        shard.set_read_ahead(1)
        with pytest.raises(ConfigError, match=r"set_read_ahead\(2\): the loop has got 1 batches"):
            shard.set_read_ahead(2)
        with pytest.raises(ConfigError, match="num_batches"):
            shard.set_read_ahead(-1)


def test_batches_under_function_transforms_are_not_looked_at() -> None:
    with raysgd.local(dataset=DATA):
        model = raysgd.torch.prepare_model(nn.Linear(1, 1))
        batch = next(iter(raysgd.get_dataset().get_split().to_torch(SIZE)))
        found = torch.func.vmap(torch.func.jacrev(model))(batch["x"])
        assert found.shape == (SIZE, 1, 1)


def test_copies_of_a_prepared_model_are_those_of_the_model_alone() -> None:
    model = raysgd.torch.prepare_model(nn.Linear(1, 1))
    without = "import pickle, sys\nsys.modules['raysgd'] = None\n"
    script = f"{without}model = pickle.loads(sys.stdin.buffer.read())\nimport torch\nmodel(torch.ones(1, 1))"
    for each in (model, copy.deepcopy(model)):
        subprocess.run([sys.executable, "-c", script], input=pickle.dumps(each), check=True)


def test_scripted_model_is_prepared() -> None:
    model = torch.jit.script(nn.Linear(1, 1))
    assert raysgd.torch.prepare_model(model)(torch.ones(1, 1)).shape == (1, 1)
