"""raysgd's own processes are asked for a sign of life; one that does not run is killed. No process is involved here."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raysgd.workers.liveness.node_agent import ProcessStatus
from raysgd.workers.liveness.own_processes import Place, ProcessWatch

TIMEOUT_S = 8.0
STEP_S = 0.5
HERE = Place("here", 7)


class FakeProcesses:
    """One process, whose state the test sets.

    Attributes:
        answers: Whether it answers.
        is_stopped: Whether it is stopped.
        cpu_share: The part of a core that it uses.
        waited_share: The part of the time that it waits for a core.
        is_cut_off: Whether its node does not answer.
        place: Where it is; None if Ray knows no process.
        error: What its actor's answers raise.
        killed: Where processes were killed.
        num_asked: How often it was asked.
    """

    def __init__(self) -> None:
        self.answers = True
        self.is_cut_off = False
        self.is_stopped = False
        self.cpu_share = self.waited_share = 0.0
        self.place: Place | None = HERE
        self.error: Exception | None = None
        self.killed: list[Place] = []
        self.num_asked = 0
        self.now = 0.0
        self._pending: list[Future[int]] = []

    def ask(self, actor: Any) -> Future[int]:
        self.num_asked += 1
        future: Future[int] = Future()
        self._pending.append(future)
        self.answer()
        return future

    def answer(self) -> None:
        """Answer what was asked, if the process answers."""
        if self.error is None and (self.is_cut_off or not self.answers):
            return
        for future in self._pending:
            if self.error is not None:
                future.set_exception(self.error)
            else:
                future.set_result(HERE.pid)
        self._pending.clear()

    def find(self, actor: Any) -> Place | None:
        return self.place

    def check(self, place: Place, timeout_s: float) -> ProcessStatus | None:
        if self.is_cut_off:
            raise TimeoutError
        return ProcessStatus(self.now * self.cpu_share, self.is_stopped, self.now * self.waited_share)

    def kill(self, place: Place, timeout_s: float) -> None:
        self.killed.append(place)

    def close(self) -> None:
        """Do nothing."""


class Watching:
    """A watch whose clock the test moves, of one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.processes = FakeProcesses()
        self.why: list[str] = []
        self.gone = 0
        self.cut_off: list[str] = []
        monkeypatch.setattr("time.monotonic", lambda: self.processes.now)
        self.watch = ProcessWatch(TIMEOUT_S, self.processes)  # type: ignore[arg-type]
        self.watch._thread = object()  # type: ignore[assignment]  # the test calls `step`
        settings |= {"on_kill": self.why.append, "on_gone": self._on_gone, "on_cut_off": self.cut_off.append}
        self.watch.add("it", lambda: "actor", **settings)

    def _on_gone(self) -> None:
        self.gone += 1

    def run(self, seconds: float) -> None:
        """Let the time pass; ``step`` is called as its thread does."""
        for _ in range(round(seconds / STEP_S)):
            self.processes.now += STEP_S
            self.processes.answer()
            self.watch.step(self.processes.now)


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Watching:
    return Watching(monkeypatch)


def test_process_that_answers_is_asked_four_times_in_the_timeout_and_lives(watching: Watching) -> None:
    watching.run(10 * TIMEOUT_S)
    assert watching.processes.killed == []
    assert 30 <= watching.processes.num_asked <= 45


def test_stopped_process_is_killed_once_after_the_timeout(watching: Watching) -> None:
    watching.run(4)
    watching.processes.answers, watching.processes.is_stopped = False, True
    watching.run(0.7 * TIMEOUT_S)  # its last answer was up to a quarter of the timeout ago
    assert watching.processes.killed == []
    watching.run(TIMEOUT_S / 2)
    assert watching.processes.killed == [HERE]
    assert "SIGSTOP" in watching.why[0]


def test_process_that_uses_no_cpu_is_killed(watching: Watching) -> None:
    watching.run(4)
    watching.processes.answers = False
    watching.run(1.5 * TIMEOUT_S)
    assert watching.processes.killed == [HERE]
    assert "it does not run" in watching.why[0]


def test_process_that_the_watch_was_too_late_to_ask_is_not_killed(watching: Watching) -> None:
    """A node that does not answer holds up the watch for longer than the timeout."""
    watching.run(4)
    for _ in range(4):
        watching.processes.now += 2 * TIMEOUT_S
        watching.watch.step(watching.processes.now)
        watching.processes.answer()
    assert watching.processes.killed == []


def test_process_whose_cpu_use_was_seen_only_once_is_not_killed(watching: Watching) -> None:
    watching.run(4)
    watching.processes.answers, watching.processes.cpu_share = False, 1.0
    watching.run(TIMEOUT_S / 2 - 1)
    watching.processes.now += TIMEOUT_S
    watching.watch.step(watching.processes.now)
    assert watching.processes.killed == []


def test_error_about_one_process_does_not_keep_the_others_unwatched(watching: Watching) -> None:
    def find() -> Any:
        raise RuntimeError("Ray's global control service is away")

    watching.watch._watched = {}
    watching.watch.add("another", find)
    watching.watch.add("it", lambda: "actor", on_kill=watching.why.append)
    watching.run(4)
    watching.processes.answers = False
    watching.run(1.5 * TIMEOUT_S)
    assert watching.processes.killed == [HERE]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_process_that_may_import_modules_is_killed_only_if_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    watching = Watching(monkeypatch, is_starting=True)
    watching.run(4)
    watching.processes.answers, watching.processes.is_stopped = False, is_stopped
    watching.run(1.3 * TIMEOUT_S)
    assert watching.processes.killed == [HERE] * is_stopped


@pytest.mark.parametrize("share", ["cpu_share", "waited_share"])
def test_process_that_uses_a_cpu_or_waits_for_one_is_not_killed(watching: Watching, share: str) -> None:
    watching.run(4)
    watching.processes.answers = False
    setattr(watching.processes, share, 0.8)
    watching.run(5 * TIMEOUT_S)
    assert watching.processes.killed == []


def test_process_that_has_never_answered_is_killed_only_if_it_was_stopped(watching: Watching) -> None:
    watching.processes.answers = False
    watching.run(5 * TIMEOUT_S)  # it starts from a slow disk
    assert watching.processes.killed == []
    watching.processes.is_stopped = True
    watching.run(1)
    assert watching.processes.killed == [HERE]


def test_known_process_that_was_never_asked_is_killed_if_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    watching = Watching(monkeypatch, pid=HERE.pid)
    watching.processes.answers = False
    watching.run(1.5 * TIMEOUT_S)
    assert watching.processes.killed == [HERE]


def test_messages_are_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    watching = Watching(monkeypatch, pid=HERE.pid)
    for _ in range(20):
        watching.run(1)
        watching.watch.on_message("it")
    assert watching.processes.num_asked == 0
    assert watching.processes.killed == []


def test_silence_while_the_watching_process_itself_did_not_run_does_not_count(watching: Watching) -> None:
    watching.run(4)
    watching.processes.answers = False
    watching.processes.now += 10 * TIMEOUT_S
    watching.watch.step(watching.processes.now, gap_s=10 * TIMEOUT_S)
    watching.run(TIMEOUT_S / 2)
    watching.processes.answers = True
    watching.run(TIMEOUT_S)
    assert watching.processes.killed == []


def test_process_on_a_node_that_is_cut_off_is_reported_once_and_not_killed(watching: Watching) -> None:
    watching.run(4)
    watching.processes.is_cut_off = True
    watching.run(0.7 * TIMEOUT_S)
    assert watching.cut_off == []
    watching.run(3 * TIMEOUT_S)
    (why,) = watching.cut_off
    assert "nor did its node: it is lost or cut off" in why
    watching.processes.is_cut_off, watching.processes.answers = False, False
    watching.run(3.5 * TIMEOUT_S)  # its answer may take as long as the connection was cut
    assert watching.processes.killed == []
    watching.processes.answers = True
    watching.run(1)
    watching.processes.is_cut_off = True
    watching.run(1.5 * TIMEOUT_S)
    assert len(watching.cut_off) == 2 and watching.processes.killed == []


def test_process_that_does_not_run_after_a_cut_is_killed(watching: Watching) -> None:
    watching.run(4)
    watching.processes.is_cut_off = True
    watching.run(2 * TIMEOUT_S)
    watching.processes.is_cut_off, watching.processes.answers = False, False
    watching.run(4.5 * TIMEOUT_S)
    assert watching.processes.killed == [HERE]


def test_actor_that_is_dead_for_good_is_watched_no_longer(watching: Watching) -> None:
    watching.run(4)
    watching.processes.error = ActorDiedError()
    watching.run(4)
    asked = watching.processes.num_asked
    watching.run(4 * TIMEOUT_S)
    assert (watching.gone, watching.processes.num_asked) == (1, asked)


def test_actor_that_starts_again_is_watched_again(watching: Watching) -> None:
    watching.run(4)
    watching.processes.error, watching.processes.place = ActorUnavailableError("", None), None
    watching.run(3 * TIMEOUT_S)
    watching.processes.error, watching.processes.place = None, HERE
    watching.run(4)
    assert (watching.gone, watching.processes.killed) == (0, [])
    watching.processes.answers, watching.processes.is_stopped = False, True
    watching.run(1.5 * TIMEOUT_S)
    assert watching.processes.killed == [HERE]


def test_removed_actor_is_not_watched(watching: Watching) -> None:
    watching.processes.answers, watching.processes.is_stopped = False, True
    watching.watch.remove("it")
    watching.run(5 * TIMEOUT_S)
    assert watching.processes.killed == []
