"""From a backend's name to its config: those that are shipped, and those that other distributions add."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest

import raysgd
from raysgd.backends import registry
from raysgd.backends.registry import ENTRY_POINTS, resolve_backend
from raysgd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OtherConfig(raysgd.BackendConfig):
    name: ClassVar[str] = "other"
    width: int = 1

    def make(self) -> raysgd.Backend:
        raise NotImplementedError


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other distributions are installed with."""
    points = [
        EntryPoint("other", f"{__name__}:OtherConfig", ENTRY_POINTS),
        EntryPoint("broken", "no_such_module:Config", ENTRY_POINTS),
        EntryPoint("odd", "os:getpid", ENTRY_POINTS),
        EntryPoint("torch", "no_such_module:Config", ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [each for each in points if each.group == group])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("torch", raysgd.TorchConfig()),
        ("horovod", raysgd.HorovodConfig()),
        ("tensorflow", raysgd.TensorflowConfig()),
        ("jax", raysgd.JaxConfig()),
        ("none", raysgd.NoneConfig()),
    ],
)
def test_each_that_is_shipped_is_known_by_its_name(name: str, config: raysgd.BackendConfig) -> None:
    assert resolve_backend(name, None) == config
    assert resolve_backend(config, None) is config


def test_another_distributions_is_known_by_its_entry_point(others: None) -> None:
    assert resolve_backend("other", {"width": 3}) == OtherConfig(width=3)


def test_an_entry_point_takes_no_name_that_is_shipped(others: None) -> None:
    assert resolve_backend("torch", None) == raysgd.TorchConfig()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("broken", "no_such_module:Config, which cannot be imported: ModuleNotFoundError"),
        ("odd", "os:getpid, which is no subclass of raysgd.BackendConfig"),
        ("othr", "did you mean 'other'"),
        ("toch", "did you mean 'torch'"),
        (3, "backend=3 is not known"),
    ],
)
def test_what_cannot_be_is_told(others: None, name: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve_backend(name, None)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: raysgd.HorovodConfig(framework="mxnet"), r"HorovodConfig\(framework\)"),
        (lambda: raysgd.HorovodConfig(timeout_s=0), r"HorovodConfig\(timeout_s\)"),
        (lambda: raysgd.HorovodConfig(nics="eth0"), r"HorovodConfig\(nics\)='eth0' is a str; give a list of names"),
        (lambda: raysgd.HorovodConfig(nics=[]), r"HorovodConfig\(nics\)=\[\] is no list of names"),
        (lambda: raysgd.HorovodConfig(nics=[0]), r"HorovodConfig\(nics\)=\[0\] is no list of names"),
        (lambda: raysgd.TensorflowConfig(init_timeout_s=-1), r"TensorflowConfig\(init_timeout_s\)"),
        (lambda: raysgd.JaxConfig(devices_per_worker=0), r"JaxConfig\(devices_per_worker\)"),
        (lambda: raysgd.JaxConfig(collectives="nccl"), r"JaxConfig\(collectives\)"),
        (lambda: raysgd.JaxConfig(platform="gpu"), r"JaxConfig\(platform\)"),
    ],
)
def test_a_config_is_checked_when_it_is_made(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


@pytest.mark.parametrize(
    ("config", "missing", "told"),
    [
        (raysgd.HorovodConfig(), ["horovod", "horovod.torch"], "doc/guides/backends.md says how"),
        (raysgd.TensorflowConfig(), ["tensorflow"], r"pip install raysgd\[tensorflow\]"),
        (raysgd.JaxConfig(), ["jax", "jaxlib"], r"pip install raysgd\[jax\]"),
        (raysgd.TorchConfig(), ["torch", "torch.distributed.nn.functional"], r"pip install raysgd\[torch\]"),
    ],
)
def test_what_is_not_installed_is_told_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, config: raysgd.BackendConfig, missing: list[str], told: str
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(ImportError, match=told):
        config.make().load()
    if config.is_coordinated:
        with pytest.raises(ImportError, match=told):
            config.make_coordinator()


def test_a_tensorflow_process_is_kept_unless_it_is_to_be_replaced() -> None:
    assert raysgd.TensorflowConfig().reforms_in_process
    assert not raysgd.TensorflowConfig(replace_workers=True).reforms_in_process
