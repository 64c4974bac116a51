"""``init_process_group`` and ``destroy_process_group`` of a script, in a process that is in a group of raysgd."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from raysgd.backends import torch_scripts
from raysgd.backends.torch_scripts import GivenGroup
from raysgd.errors import UsageError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the functions in place, and torch's own back afterwards."""
    for module in (dist, distributed_c10d):
        for name in ("init_process_group", "destroy_process_group"):
            monkeypatch.setattr(module, name, getattr(module, name))
    torch_scripts.install()
    torch_scripts.install()
    yield
    torch_scripts.take_back()


@pytest.fixture
def given_group(group: None, installed: None) -> Any:
    """This process is the only member of a group of raysgd."""
    torch_scripts.give(GivenGroup("gloo", 0, 1))
    return dist.group.WORLD


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"backend": "gloo"},
        {"backend": dist.Backend.GLOO, "init_method": "env://"},
        {"backend": "GLOO", "rank": 0, "world_size": 1},
        {"backend": "cpu:gloo", "init_method": "tcp://127.0.0.1:29500", "rank": 0, "world_size": 1},
        {"store": dist.HashStore(), "rank": 0, "world_size": 1},
    ],
    ids=" ".join,
)
def test_group_that_is_there_can_be_asked_for(given_group: Any, asked: dict[str, Any]) -> None:
    dist.init_process_group(**asked)
    assert dist.group.WORLD is given_group


def test_group_stays_until_raysgd_destroys_it(given_group: Any) -> None:
    dist.destroy_process_group()
    dist.destroy_process_group(dist.group.WORLD)
    assert dist.is_initialized()
    dist.init_process_group("gloo")
    assert dist.group.WORLD is given_group


@pytest.mark.parametrize("asked", [{"backend": "nccl"}, {"world_size": 2, "rank": 0}, {"world_size": 1, "rank": 3}])
def test_another_group_is_refused_with_what_to_do(given_group: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"made: gloo, rank 0 of 1\. Leave the call out.*backend_args="):
        dist.init_process_group(**asked)
    assert dist.group.WORLD is given_group


def test_timeout_of_the_script_applies(given_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[timedelta] = []
    monkeypatch.setattr(distributed_c10d, "_set_pg_timeout", applied.append)
    dist.init_process_group("gloo", timeout=timedelta(hours=2))
    assert applied == [timedelta(hours=2)]


def test_part_of_the_group_is_destroyed_at_once(given_group: Any) -> None:
    part = dist.new_group([0])
    dist.destroy_process_group(part)
    assert part not in distributed_c10d._world.pg_map


def test_script_makes_another_group_after_it_has_destroyed_the_given_one(installed: None, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    given = dist.group.WORLD
    torch_scripts.give(GivenGroup("gloo", 0, 2))
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    assert dist.group.WORLD is not given
    dist.destroy_process_group()
    assert not dist.is_initialized()


def test_functions_are_torchs_own_without_a_given_group(installed: None) -> None:
    assert pickle.loads(pickle.dumps(dist.init_process_group)) is dist.init_process_group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert not dist.is_initialized()
