"""Backend names resolve to configs: the built-in ones, and those of other distributions."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import raysgd
from raysgd.backends.registry import ENTRY_POINTS, resolve_backend
from raysgd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OtherConfig(raysgd.BackendConfig):
    name: ClassVar[str] = "other"
    width: int = 1

    def make_backend(self) -> raysgd.Backend:
        raise NotImplementedError


@pytest.fixture
def entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install another distribution that declares entry points."""
    folder = tmp_path / "other_backends-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other-backends\nVersion: 1.0\n")
    points = {
        "other": f"{__name__}:OtherConfig",
        "broken": "no_such_module:Config",
        "odd": "os:getpid",
        "torch": "no_such_module:Config",
    }
    lines = [f"[{ENTRY_POINTS}]", *(f"{name} = {value}" for name, value in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("torch", raysgd.TorchConfig()),
        ("pytorch", raysgd.TorchConfig()),
        ("horovod", raysgd.HorovodConfig()),
        ("tensorflow", raysgd.TensorflowConfig()),
        ("jax", raysgd.JaxConfig()),
        ("env", raysgd.EnvConfig()),
        ("none", raysgd.NoneConfig()),
    ],
)
def test_built_in_backend_is_resolved_by_name(name: str, config: raysgd.BackendConfig) -> None:
    assert resolve_backend(name, None) == config
    assert resolve_backend(config, None) is config


def test_backend_of_another_distribution_is_resolved_by_entry_point(entry_points: None) -> None:
    assert resolve_backend("other", {"width": 3}) == OtherConfig(width=3)


def test_entry_point_cannot_replace_a_built_in_backend(entry_points: None) -> None:
    assert resolve_backend("torch", None) == raysgd.TorchConfig()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "no_such_module:Config, which cannot be imported: ModuleNotFoundError"),
        ("odd", "os:getpid, which is not a subclass of raysgd.BackendConfig"),
        ("othr", "did you mean 'other'"),
        ("toch", "did you mean 'torch'"),
        ("Torch", "did you mean 'torch'"),
        ("torchrun", "give backend='env'"),
        (3, "backend=3 is not known"),
    ],
)
def test_unusable_backend_name_is_refused(entry_points: None, name: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_backend(name, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: raysgd.HorovodConfig(framework="mxnet"), r"HorovodConfig\(framework\)"),
        (lambda: raysgd.HorovodConfig(timeout_s=0), r"HorovodConfig\(timeout_s\)"),
        (lambda: raysgd.HorovodConfig(nics="eth0"), r"HorovodConfig\(nics\)='eth0' is a str; give a list of names"),
        (lambda: raysgd.HorovodConfig(nics=[]), r"HorovodConfig\(nics\)=\[\] is not a list of names"),
        (lambda: raysgd.HorovodConfig(nics=[0]), r"HorovodConfig\(nics\)=\[0\] is not a list of names"),
        (lambda: raysgd.JaxConfig(devices_per_worker=0), r"JaxConfig\(devices_per_worker\)"),
        (lambda: raysgd.JaxConfig(collectives="nccl"), r"JaxConfig\(collectives\)"),
        (lambda: raysgd.JaxConfig(platform="gpu"), r"JaxConfig\(platform\)"),
    ],
)
def test_config_is_checked_when_it_is_created(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("config", "missing", "message"),
    [
        (raysgd.HorovodConfig(), ["horovod", "horovod.torch"], "doc/guides/backends.md says how"),
        (raysgd.TensorflowConfig(), ["tensorflow"], r"pip install raysgd\[tensorflow\]"),
        (raysgd.JaxConfig(), ["jax", "jaxlib"], r"pip install raysgd\[jax\]"),
        (raysgd.TorchConfig(), ["torch", "torch.distributed.nn.functional"], r"pip install raysgd\[torch\]"),
    ],
)
def test_missing_framework_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, config: raysgd.BackendConfig, missing: list[str], message: str
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(ImportError, match=message):
        config.make_backend().load()
    if config.has_coordinator:
        with pytest.raises(ImportError, match=message):
            config.make_coordinator()


def test_tensorflow_process_rejoins_unless_replace_workers_is_set() -> None:
    assert raysgd.TensorflowConfig().can_rejoin
    assert not raysgd.TensorflowConfig(replace_workers=True).can_rejoin
