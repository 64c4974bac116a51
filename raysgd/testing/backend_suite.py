"""A conformance suite for backends, third-party ones included. Its tests need a running Ray cluster.

In a test module of your own, with a fixture that calls ``ray.init(num_cpus=8)``::

    @pytest.mark.usefixtures("my_cluster")
    class TestMyBackend(BackendSuite):
        def make_config(self) -> BackendConfig:
            return MyConfig()

        @staticmethod
        def make_total() -> Callable[[float], float]:
            import my_framework

            return my_framework.add_up_over_all_ranks

`raysgd.testing.backend_nodes_suite` has the tests on two nodes.

Every test creates a Trainer of its own, as a user would; some tests kill processes of its workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from raysgd.backends.base import BackendConfig
from raysgd.callbacks.progress.callback import ProgressCallback
from raysgd.config import FailureConfig, RunConfig
from raysgd.session import api as session
from raysgd.testing.cluster import ClusterState, check_cluster
from raysgd.trainer.trainer import Trainer

Total = Callable[[float], float | None]
#: Far longer than any test needs.
TIMEOUT_S = 90.0
_STEP_S = 0.02
SLOW_STEP_S = 0.2


class BackendUnderTest:
    """The backend under test, for all suites."""

    def make_config(self) -> BackendConfig:
        """Return a new config, as a user would create it."""
        raise NotImplementedError

    @staticmethod
    def make_total() -> Total:
        """Return, in a worker in its group, a function that sums a number over all ranks by a collective."""
        raise NotImplementedError

    @contextmanager
    def trainer(self, folder: Path, num_workers: int | tuple[int, float], **settings: Any) -> Iterator[Trainer]:
        """Yield a Trainer with this backend, and check afterwards that nothing of it is left in the cluster."""
        before = ClusterState.now()
        with self.make_trainer(folder, num_workers, **settings) as trainer:
            yield trainer
        check_cluster(before, TIMEOUT_S)

    def make_trainer(self, folder: Path, num_workers: int | tuple[int, float], **settings: Any) -> Trainer:
        return Trainer(num_workers, self.make_config(), run_config=RunConfig(storage_path=str(folder)), **settings)


def run_all(trainer: Trainer, train_func: Callable[[], Any]) -> list[Any]:
    """Run without output, and return what each rank returned."""
    return list(trainer.run(train_func, callbacks=quiet(), returns="all"))


def quiet() -> list[ProgressCallback]:
    """Return the callbacks of a run without output."""
    return [ProgressCallback(mode="off")]


class BackendSuite(BackendUnderTest):
    """Subclass it as ``Test...`` with `make_config` and `make_total`; pytest runs its tests."""

    #: Whether members can sum numbers; if False, `make_total` is not called.
    has_collectives: ClassVar[bool] = True
    #: The time for all members of a group to notice that one was killed, and to leave.
    notices_within_s: ClassVar[float] = 5.0

    @pytest.mark.parametrize("num_workers", [1, 2, 3])
    def test_ranks_and_sums_are_right(self, tmp_path: Path, num_workers: int) -> None:
        with self.trainer(tmp_path, num_workers) as trainer:
            seen = run_all(trainer, self._sum_and_describe())
        assert [each["rank"] for each in seen] == list(range(num_workers))
        assert {each["size"] for each in seen} == {num_workers}
        self._check_sums(seen)

    def test_trainer_can_run_again(self, tmp_path: Path) -> None:
        """The second run has the same processes if they can join a second group, else new ones."""
        with self.trainer(tmp_path, 2) as trainer:
            first, second = (run_all(trainer, self._sum_and_describe()) for _ in range(2))
        self._check_sums(second)
        self._check_kept([each["pid"] for each in first], [each["pid"] for each in second])

    @pytest.mark.parametrize("victim", [0, 2])
    def test_killed_rank_is_noticed_and_replaced(self, tmp_path: Path, victim: int) -> None:
        train_func = self._sum_until_killed(victim, tmp_path)
        with self.trainer(tmp_path, 3, failure_config=FailureConfig(abort_grace_s=30)) as trainer:
            seen = run_all(trainer, train_func)
        self._check_sums(seen)
        others = [rank for rank in range(3) if rank != victim]
        left_at = {rank: float((tmp_path / f"left_{rank}").read_text()) for rank in others}
        killed_at = float((tmp_path / "killed").read_text())
        late = {rank: at - killed_at for rank, at in left_at.items() if at - killed_at > self.notices_within_s}
        assert not late, f"seconds until these ranks noticed the death: {late}"
        before = [int((tmp_path / f"pid_{rank}").read_text()) for rank in others]
        self._check_kept(before, [seen[rank]["pid"] for rank in others])

    def test_group_shrinks_and_grows(self, tmp_path: Path) -> None:
        """Two of three ranks continue after a kill, and three again when a worker has joined."""
        train_func = self._sum_in_all_sizes(tmp_path)
        with self.trainer(tmp_path, (2, 3)) as trainer:
            seen = run_all(trainer, train_func)
        groups = seen[0]["groups"][-3:]  # the run may have begun with two workers
        assert [len(pids) for pids in groups] == [3, 2, 3]
        self._check_sums(seen)
        for before, after in pairwise(groups):
            if self.make_config().can_rejoin:
                assert set(before) <= set(after) or set(after) <= set(before), "a survivor was replaced"
            else:
                self._check_kept(before, after)

    def test_error_of_one_rank_is_raised(self, tmp_path: Path) -> None:
        """The collective errors of the ranks that wait for that rank are not raised."""
        with self.trainer(tmp_path, 3) as trainer:
            with pytest.raises(LookupError, match="the cause"):
                run_all(trainer, self._raise_in_rank(1))
            self._check_sums(run_all(trainer, self._sum_and_describe()))

    def test_two_trainers_run_at_the_same_time(self, tmp_path: Path) -> None:
        before = ClusterState.now()
        with self.make_trainer(tmp_path / "a", 2) as one, self.make_trainer(tmp_path / "b", 2) as other:
            files = [tmp_path / "a_has_begun", tmp_path / "b_has_begun"]
            train_funcs = [self._sum_until_both_run(files), self._sum_until_both_run(files[::-1])]
            streams = [
                trainer.run_generator(train_func, callbacks=quiet(), returns="all")
                for trainer, train_func in zip((one, other), train_funcs, strict=True)
            ]
            both = [stream.get_returns() for stream in streams]
        check_cluster(before, TIMEOUT_S)
        for seen in both:
            self._check_sums(seen)
        assert len({each["pid"] for seen in both for each in seen}) == 4

    def test_former_groups_leave_nothing_behind(self, tmp_path: Path) -> None:
        """Listening ports and threads do not grow with the number of groups that a process was in."""
        num_groups = 8
        with self.trainer(tmp_path, 2) as trainer:
            first = self._remains_after(trainer, 2)
            last = self._remains_after(trainer, num_groups)
            pids = [each["pid"] for each in last]
        is_kept = self.make_config().can_rejoin
        for before, after in zip(first, last, strict=True):
            if not is_kept and before["pid"] != after["pid"]:
                continue
            grown = {name: after[name] - before[name] for name in ("ports", "threads")}
            # One or two may come from Ray or from a pool that fills slowly. If each group leaves something behind for good,
            # the process must be replaced in time (`Backend.should_replace_process`).
            assert max(grown.values()) < num_groups / 2, f"{after['who']}: {grown} in {num_groups} groups"
        deadline = time.monotonic() + TIMEOUT_S
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]

    def _remains_after(self, trainer: Trainer, num_groups: int) -> list[dict[str, Any]]:
        """Run ``num_groups`` times; return the ports and threads of each worker, then of the coordinator if there is one."""
        for _ in range(num_groups):
            self._check_sums(run_all(trainer, self._sum_and_describe()))
        found = list(trainer.execute(_remains))
        coordinators = [_of_process(process, "the coordinator") for process in _coordinators()]
        assert len(coordinators) == self.make_config().has_coordinator
        return found + coordinators

    def _check_sums(self, seen: list[dict[str, Any]]) -> None:
        expected = sum(range(1, len(seen) + 1)) if self.has_collectives else None
        assert [each["total"] for each in seen] == [expected] * len(seen)

    def _check_kept(self, before: list[int], after: list[int]) -> None:
        if self.make_config().can_rejoin:
            assert after == before
        else:
            assert not set(before) & set(after)

    def _total(self) -> Callable[[], Total]:
        return self.make_total if self.has_collectives else _no_total

    def _sum_and_describe(self, num_steps: int = 2) -> Callable[[], dict[str, Any]]:
        make_total = self._total()

        def train_func() -> dict[str, Any]:
            total = make_total()
            for _ in range(num_steps):
                found = total(session.world_rank() + 1)
            return {"rank": session.world_rank(), "size": session.world_size(), "total": found, "pid": os.getpid()}

        return train_func

    def _sum_until_both_run(self, files: list[Path]) -> Callable[[], dict[str, Any]]:
        """Sum until the other Trainer's workers run, too: they create the second file."""
        own, others = files
        make_total = self._total()

        def train_func() -> dict[str, Any]:
            rank, size, total = session.world_rank(), session.world_size(), make_total()
            for _ in range(int(TIMEOUT_S / _STEP_S)):
                found = total(rank + 1)
                own.touch()
                has_other = others.exists()
                if total(float(has_other)) in (None, size) and has_other:  # all ranks leave at the same step
                    return {"total": found, "pid": os.getpid()}
                time.sleep(_STEP_S)
            raise TimeoutError("the other Trainer's workers did not begin")

        return train_func

    def _sum_until_killed(self, victim: int, folder: Path) -> Callable[[], dict[str, Any]]:
        make_total = self._total()

        def train_func() -> dict[str, Any]:
            rank, total = session.world_rank(), make_total()
            found = total(rank + 1)
            if (folder / "killed").exists():
                return {"total": found, "pid": os.getpid()}
            (folder / f"pid_{rank}").write_text(str(os.getpid()))
            session.barrier()
            try:
                for step in range(10**6):
                    if (step, rank) == (20, victim):
                        (folder / "killed").write_text(str(time.time()))
                        os.kill(os.getpid(), signal.SIGKILL)
                    total(1.0)
                    time.sleep(_STEP_S)
            finally:
                (folder / f"left_{rank}").write_text(str(time.time()))
            raise AssertionError("no rank was killed")

        return train_func

    def _sum_in_all_sizes(self, folder: Path) -> Callable[[], dict[str, Any]]:
        make_total = self._total()

        def train_func() -> dict[str, Any]:
            rank, size, total = session.world_rank(), session.world_size(), make_total()
            saved = session.load_checkpoint() or {"groups": []}
            pids = session.gather(os.getpid())
            groups = [*session.broadcast(saved["groups"]), pids]
            for step in range(int(TIMEOUT_S / SLOW_STEP_S)):
                found = total(rank + 1)
                if [len(each) for each in groups][-3:] == [3, 2, 3]:
                    return {"total": found, "groups": groups}
                session.save_checkpoint({"groups": groups})
                if (step, rank, size) == (5, 2, 3) and not (folder / "killed").exists():
                    (folder / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(SLOW_STEP_S)
            raise TimeoutError(f"the groups had the sizes {groups}")

        return train_func

    def _raise_in_rank(self, rank: int) -> Callable[[], None]:
        make_total = self._total()

        def train_func() -> None:
            total = make_total()
            total(1.0)
            if session.world_rank() == rank:
                raise LookupError("the cause")
            while True:
                total(1.0)
                session.barrier()

        return train_func


def _no_total() -> Total:
    return lambda value: None


def _remains() -> dict[str, Any]:
    """Return what a former group may have left in this process."""
    return _of_process(psutil.Process(), f"rank {session.world_rank()}")


def _of_process(process: psutil.Process, who: str) -> dict[str, Any]:
    listening = [link for link in process.net_connections("tcp") if link.status == psutil.CONN_LISTEN]
    return {"who": who, "pid": process.pid, "ports": len(listening), "threads": process.num_threads()}


def _coordinators() -> list[psutil.Process]:
    """Return the processes of coordinators in the cluster that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just exited
            if "ray::CoordinatorActor" in " ".join(process.cmdline()):
                found.append(process)
    return found
