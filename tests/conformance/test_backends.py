"""The conformance suite for backends, over every backend that is shipped."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.testing.backend_suite import BackendSuite
from support.frameworks import needs_horovod
from support.poll import until
from support.runs import PATIENCE_S, actor_pids, make_trainer, quiet, travels_by_value
from support.totals import TOTALS

travels_by_value(__name__)
travels_by_value("support.totals")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]


def long_but_for(*names: str) -> Callable[[type[BackendSuite]], type[BackendSuite]]:
    """Mark a suite's tests ``long``, as another one shows nearly the same, all but some."""

    def marked(suite: type[BackendSuite]) -> type[BackendSuite]:
        tests = {name for name in dir(suite) if name.startswith("test_")}
        assert tests > set(names), f"of {names} not all are tests"
        for name in tests - set(names):
            setattr(suite, name, pytest.mark.long(_copy_of(getattr(suite, name))))
        return suite

    return marked


def _copy_of(test: Callable[..., None]) -> Callable[..., None]:
    """A mark on the function itself would be one on that of all suites."""

    @wraps(test)
    def copy(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)

    return copy


@dataclass(frozen=True, kw_only=True)
class UsedOnceConfig(raysgd.NoneConfig):
    """Processes that can be in one group only."""

    @property
    def reforms_in_process(self) -> bool:
        return False


class TestNone(BackendSuite):
    has_collectives = False

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.NoneConfig()


class TestNoneInNewProcesses(BackendSuite):
    has_collectives = False

    def make_config(self) -> raysgd.BackendConfig:
        return UsedOnceConfig()


def test_processes_that_can_join_no_other_group_are_replaced_by_spares_first(tmp_path: Path) -> None:
    failure = raysgd.FailureConfig(spares=1)
    with make_trainer(tmp_path, 2, UsedOnceConfig(), failure=failure) as trainer:
        first = trainer.run(os.getpid, callbacks=quiet(), returns="all")
        (spare,) = until(lambda: set(actor_pids("WorkerActor")) - set(first), PATIENCE_S)
        second = trainer.run(os.getpid, callbacks=quiet(), returns="all")
    assert spare in second
    assert not set(first) & set(second)


class TestTorch(BackendSuite):
    make_total = staticmethod(TOTALS["torch"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.TorchConfig()


@needs_horovod
class TestHorovodWithTorch(BackendSuite):
    make_total = staticmethod(TOTALS["horovod-torch"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.HorovodConfig()


@pytest.mark.long  # outside of `hvd.elastic.run`, of which tests/fault/test_horovod_elastic.py is
@needs_horovod
class TestHorovodElastic(BackendSuite):
    make_total = staticmethod(TOTALS["horovod-torch"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.HorovodConfig(elastic="horovod")


@long_but_for("test_a_killed_rank_is_noticed_and_replaced", "test_a_smaller_group_and_a_larger_one")  # as with torch
@needs_horovod
class TestHorovodWithTensorflow(BackendSuite):
    make_total = staticmethod(TOTALS["horovod-tensorflow"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.HorovodConfig(framework="tensorflow")


class TestTensorflow(BackendSuite):
    make_total = staticmethod(TOTALS["tensorflow"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.TensorflowConfig()


@pytest.mark.long  # each group imports TensorFlow anew
class TestTensorflowInNewProcesses(BackendSuite):
    make_total = staticmethod(TOTALS["tensorflow"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.TensorflowConfig(replace_workers=True)


class TestJax(BackendSuite):
    make_total = staticmethod(TOTALS["jax"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.JaxConfig()
