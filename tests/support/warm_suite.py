"""The conformance suite for backends in warm processes, which import their framework once and not for each test."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

import raysgd
from raysgd.testing import ClusterState, check_cluster
from raysgd.testing.backend_suite import TIMEOUT_S, BackendSuite


@pytest.mark.shared_trainer
class WarmSuite(BackendSuite):
    """The suite with one Trainer of two workers and one of three, which serve one test after the other."""

    #: Tests that a Trainer serves.
    tests_per_trainer: ClassVar[float] = math.inf
    _warm: ClassVar[dict[int, raysgd.Trainer] | None] = None
    _num_tests: ClassVar[Counter[int]]

    @pytest.fixture(scope="class")
    @classmethod
    def suite_cluster(cls, ray_cluster: Any) -> None:
        """The cluster of the tests; a subclass may have another one."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _warm_trainers(cls, suite_cluster: Any) -> Iterator[None]:
        before = ClusterState.now()
        cls._warm, cls._num_tests = {}, Counter()
        yield
        cls._end_warm_trainers()
        check_cluster(before, TIMEOUT_S)

    @classmethod
    def _end_warm_trainers(cls) -> None:
        """End the warm Trainers; each test that follows has a Trainer of its own."""
        for trainer in (cls._warm or {}).values():
            trainer.shutdown()
        cls._warm = None

    @contextmanager
    def trainer(self, folder: Path, num_workers: int | tuple[int, float], **settings: Any) -> Iterator[raysgd.Trainer]:
        if self._warm is None or num_workers not in (2, 3):
            with super().trainer(folder, num_workers, **settings) as trainer:
                yield trainer
            return
        assert isinstance(num_workers, int)
        if self._num_tests[num_workers] % self.tests_per_trainer == 0:
            if num_workers in self._warm:
                self._warm.pop(num_workers).shutdown()
            # Those of the tests that kill a rank; the others need none.
            settings = {"failure_config": raysgd.FailureConfig(abort_grace_s=30)} | settings
            self._warm[num_workers] = self.make_trainer(folder, num_workers, **settings)
        self._num_tests[num_workers] += 1
        yield self._warm[num_workers]

    def test_two_trainers_run_at_the_same_time(self, tmp_path: Path) -> None:
        self._end_warm_trainers()  # there are not enough CPUs for all
        super().test_two_trainers_run_at_the_same_time(tmp_path)

    def test_former_groups_leave_nothing_behind(self, tmp_path: Path) -> None:
        self._end_warm_trainers()  # the test waits for the end of its processes
        super().test_former_groups_leave_nothing_behind(tmp_path)
