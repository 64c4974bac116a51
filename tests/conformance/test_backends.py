"""The conformance suite for backends, over every backend that is shipped.

The tests of some backends share Trainers, so that a process imports its framework once and not for each test.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import raysgd
from raysgd.testing.backend_suite import BackendSuite
from support.frameworks import needs_horovod
from support.runs import make_trainer, quiet, travels_by_value, wait_for_ready_spare
from support.totals import TOTALS
from support.warm_suite import WarmSuite

travels_by_value(__name__)
travels_by_value("support.totals")
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]


def keep_only(*names: str) -> Callable[[type[BackendSuite]], type[BackendSuite]]:
    """Keep only the named tests of a suite: another suite covers the same code."""

    def reduced(suite: type[BackendSuite]) -> type[BackendSuite]:
        tests = {name for name in dir(suite) if name.startswith("test_")}
        assert tests > set(names), f"not all of {names} are tests"
        for name in tests - set(names):
            setattr(suite, name, None)
        return suite

    return reduced


@dataclass(frozen=True, kw_only=True)
class UsedOnceConfig(raysgd.NoneConfig):
    """A backend whose processes can join only one group."""

    @property
    def can_rejoin(self) -> bool:
        return False


class TestNone(WarmSuite):
    has_collectives = False

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.NoneConfig()


@keep_only(
    "test_trainer_can_run_again", "test_killed_rank_is_noticed_and_replaced", "test_former_groups_leave_nothing_behind"
)
class TestNoneInNewProcesses(BackendSuite):
    has_collectives = False

    def make_config(self) -> raysgd.BackendConfig:
        return UsedOnceConfig()


def test_used_once_processes_are_replaced_by_spares_first(tmp_path: Path) -> None:
    failure = raysgd.FailureConfig(num_spares=1)
    with make_trainer(tmp_path, 2, UsedOnceConfig(), failure_config=failure) as trainer:
        first = trainer.run(os.getpid, callbacks=quiet(), returns="all")
        spare = wait_for_ready_spare(first)
        second = trainer.run(os.getpid, callbacks=quiet(), returns="all")
    assert spare in second
    assert not set(first) & set(second)


class TestTorch(WarmSuite):
    make_total = staticmethod(TOTALS["torch"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.TorchConfig()


@keep_only(
    "test_ranks_and_sums_are_right",
    "test_killed_rank_is_noticed_and_replaced",
    "test_group_shrinks_and_grows",
    "test_error_of_one_rank_is_raised",
)
class TestEnv(BackendSuite):
    make_total = staticmethod(TOTALS["env"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.EnvConfig()


@needs_horovod
class TestHorovodWithTorch(BackendSuite):
    make_total = staticmethod(TOTALS["horovod-torch"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.HorovodConfig()


@pytest.mark.tensorflow
@keep_only("test_killed_rank_is_noticed_and_replaced", "test_group_shrinks_and_grows")
@needs_horovod
class TestHorovodWithTensorflow(BackendSuite):
    make_total = staticmethod(TOTALS["horovod-tensorflow"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.HorovodConfig(framework="tensorflow")


@pytest.mark.tensorflow
class TestTensorflow(WarmSuite):
    make_total = staticmethod(TOTALS["tensorflow"])
    tests_per_trainer = 2  # a process is replaced after four groups

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.TensorflowConfig()


@pytest.mark.tensorflow
@keep_only("test_trainer_can_run_again", "test_killed_rank_is_noticed_and_replaced")
class TestTensorflowInNewProcesses(BackendSuite):
    make_total = staticmethod(TOTALS["tensorflow"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.TensorflowConfig(replace_workers=True)


class TestJax(BackendSuite):
    make_total = staticmethod(TOTALS["jax"])

    def make_config(self) -> raysgd.BackendConfig:
        return raysgd.JaxConfig()
