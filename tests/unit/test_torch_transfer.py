"""`to_device` moves nested batches. The device is ``meta``, which every machine has."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from raysgd.torch.devices import to_device

META = torch.device("meta")
Pair = namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str
    parts: list[torch.Tensor] = field(default_factory=list)


class Graph:
    def __init__(self, device: Any = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> Graph:
        return Graph(device)


class Labelled(list[Any]):
    label = "none"


def tensor() -> torch.Tensor:
    return torch.ones(2)


def test_tensors_are_moved_at_any_depth() -> None:
    batch = {"x": [tensor(), (tensor(), {"y": tensor()})], "pair": Pair(tensor(), 3)}
    moved = to_device(batch, META)
    found = [moved["x"][0], moved["x"][1][0], moved["x"][1][1]["y"], moved["pair"].image]
    assert [each.device for each in found] == [META] * 4
    assert moved["pair"].label == 3


def test_given_batch_is_not_changed() -> None:
    batch = {"x": [tensor()], "d": defaultdict(list, a=tensor())}
    to_device(batch, META)
    assert batch["x"][0].device == batch["d"]["a"].device == torch.device("cpu")


@pytest.mark.parametrize(
    "batch",
    [
        [tensor()],
        (tensor(),),
        Pair(tensor(), tensor()),
        {"a": tensor()},
        OrderedDict(a=tensor()),
        defaultdict(list, a=tensor()),
        Labelled([tensor()]),
        Sample(tensor(), "cat", [tensor()]),
        pack_sequence([torch.ones(2), torch.ones(1)]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_keep_their_type(batch: Any) -> None:
    assert type(to_device(batch, META)) is type(batch)


def test_attributes_of_containers_are_kept() -> None:
    batch = Labelled([tensor()])
    batch.label = "cats"
    moved = to_device({"list": batch, "dict": defaultdict(list)}, META)
    assert moved["list"].label == "cats"
    assert moved["dict"]["new"] == []


def test_read_only_mappings_are_moved() -> None:
    assert to_device(MappingProxyType({"a": tensor()}), META)["a"].device == META


def test_frozen_dataclasses_are_moved_field_by_field() -> None:
    moved = to_device(Sample(tensor(), "cat", [tensor()]), META)
    assert (moved.image.device, moved.name, moved.parts[0].device) == (META, "cat", META)


def test_objects_with_a_to_method_are_moved_by_it() -> None:
    assert to_device([Graph()], META)[0].device == META
    packed = to_device(pack_sequence([torch.ones(2), torch.ones(1)]), META)
    assert isinstance(packed, PackedSequence)
    assert packed.data.device == META


@pytest.mark.parametrize("value", ["text", b"bytes", 3, 2.5, None, True, np.ones(2), {1, 2}, Graph, Sample])
def test_other_values_are_kept(value: Any) -> None:
    assert to_device(value, META) is value
