"""`RunFuzz`: any actions of ranks, storage and users in any order, on a `RunMachine`, and checks of all that it does."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hypothesis.stateful import RuleBasedStateMachine

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.config import CheckpointConfig, FailureConfig
from raysgd.controller import commands as c
from raysgd.controller.frames import Frame
from raysgd.controller.rounds import RoundMerger
from raysgd.controller.run_plan import AttemptRecord, Start
from raysgd.controller.states import Paused, Preparing
from raysgd.result import Result
from raysgd.session import events as e
from raysgd.testing.history import find_violations
from support.run_outcome import check_outcome
from support.schedules import action, beginning
from support.simulated_storage import SimulatedStorage
from support.simulated_workers import GONE, SimulatedAttempt, SimulatedRank
from support.simulation import (
    RETURNED,
    SimulatedRun,
    broken,
    failed,
    history_of,
    part,
    previous_state_of,
    reports,
    saved,
    uri_of,
)
from support.step_log import StepLog

GIVEN = Start("/given", iteration=10, time_total_s=5.0)
#: Events that count the attempts of a run; those that are in no file after a crash are not counted.
_COUNTED = ("failure", "regroup", "resumed")
RANKS = range(1 << 16)  # taken modulo the number of candidate ranks
SAW_STOP = e.Returned(b"value", 5, saw_stop=True)


class RunFuzz(RuleBasedStateMachine):
    """Drives a `RunMachine` as workers, storage and users do, and checks each command.

    Attributes:
        scale: What numbers of ranks are multiplied by.
    """

    scale = 1

    @beginning(
        num_ranks=range(1, 4),
        max_failures=range(-1, 3),
        on_write_error=("raise", "warn"),
        num_to_keep=(None, 1, 2),
        start=(Start(), GIVEN),
        are_ready=range(8),
        is_elastic=(False, True),
        stored_every=(0, 1, 3),
        score_attribute=(None, "loss"),
    )
    def begin(
        self,
        num_ranks: int,
        max_failures: int,
        on_write_error: str,
        num_to_keep: int | None,
        start: Start,
        are_ready: int,
        is_elastic: bool,
        stored_every: int,
        score_attribute: str | None = None,
    ) -> None:
        self.is_elastic, self.stored_every = is_elastic, stored_every
        self.held: c.KeepInMemory | None = None
        self.storing: list[Manifest] = []  # from memory
        self.from_memory: set[int] = set()
        self.lost: set[int] = set()  # of those in memory
        self.max_failures, self.num_to_keep = max_failures, num_to_keep
        self.start = start
        self.attempts: list[SimulatedAttempt] = []
        self.merger = RoundMerger()
        self.results: list[Result] = []
        self.num_prepared = self.num_answered = self.num_checked = 0
        self.in_flight: list[c.CommitCheckpoint] = []
        self.numbers: list[int] = []  # of all commits, in order
        self.steps = StepLog()
        self.storage = SimulatedStorage()
        self.num_lost = 0  # failures that are in no file
        self.on_storage: dict[int, int] = {}  # iteration by number
        self.amended: set[int] = set()
        self.happened: set[str] = set()
        self.is_interrupted = False
        self.should_pause = self.is_over = False
        self.run = SimulatedRun(
            num_ranks * self.scale,
            start=start,
            failure_config=FailureConfig(max_failures=max_failures),
            checkpoint_config=CheckpointConfig(
                on_write_error=on_write_error,
                num_to_keep=num_to_keep,
                score_attribute=score_attribute,
                keep_in_memory=stored_every > 0,
                storage_interval=max(1, stored_every),
            ),
        )
        self._check()
        if are_ready:
            self.workers_are_ready()

    # -- actions ------------------------------------------------------------------------------------------------------

    @action(lambda self: self._is_waiting_for_workers(), size=range(1, 4), luck=range(8))
    def workers_are_ready(self, size: int = 1, luck: int = 1) -> None:
        self.num_answered = self.num_prepared
        if not luck and self.run.machine.checkpoints.newest_in_memory is not None:
            self.lost.add(self.run.machine.checkpoints.newest_in_memory.number)
            self.run.feed(c.MemoryCopyLost(self.run.machine.checkpoints.newest_in_memory.number))
            self.held = None
        if self.is_elastic:
            self.run.num_ranks = size * self.scale
        self.storage.flush(self.run)
        self.run.ready(enters=False)
        self._check()

    @action(lambda self: self.is_elastic)
    def a_joining_worker_is_ready(self) -> None:
        self.run.feed(c.JoiningWorkerReady())
        self._check()

    @action(lambda self: self._is_waiting_for_workers(), can_retry=(True, True, True, False))
    def group_fails_to_start(self, can_retry: bool) -> None:
        self.happened.add("died" if can_retry else "infeasible")
        self.num_answered = self.num_prepared
        self.run.feed(c.GroupFailed("WorkerError" if can_retry else "InfeasibleError", "no workers", can_retry))
        self._check()

    @action(lambda self: self._acting(), index=RANKS, count=range(1, 4))
    def a_rank_reports(self, index: int, count: int) -> None:
        rank = self._one_of(self._acting(), index)
        rank.event_queue.append(self.steps.report(self.attempts[-1].entered, rank, count))
        rank.num_reports, rank.unscored = rank.num_reports + count, None
        self._note_uneven_saves()
        rank.wait_if_due()

    @action(lambda self: self._acting(), is_written=(False, True))
    def all_ranks_save(self, is_written: bool) -> None:
        if len(self._acting()) < self.run.num_ranks:
            self.happened.add("one-sided")  # the other ranks do not make this call
        for rank in self._acting():
            self._save(rank, is_written)

    @action(lambda self: self._acting(), index=RANKS, is_written=(False, True))
    def one_rank_saves(self, index: int, is_written: bool) -> None:
        self.happened.add("one-sided")
        self._save(self._one_of(self._acting(), index), is_written)

    @action(lambda self: self._writing(), index=RANKS, succeeds=(True, True, True, False))
    def a_part_is_written(self, index: int, succeeds: bool) -> None:
        rank = self._one_of(self._writing(), index)
        call = rank.unwritten.pop(0)
        if not succeeds:
            self.happened.add("write failed")
        rank.event_queue.append(part(call) if succeeds else e.PartFailed(call, "disk full"))

    @action(lambda self: self._acting(), index=RANKS)
    def a_rank_returns(self, index: int) -> None:
        self._one_of(self._acting(), index).leave(RETURNED)

    @action(lambda self: self._acting(), index=RANKS, kind=("own", "collective", "setup", "retried"))
    def a_rank_raises(self, index: int, kind: str) -> None:
        rank, at = self._one_of(self._acting(), index), self.run.now + self.run.clock_error_s
        if kind == "setup" and (rank.num_reports or rank.num_calls):
            kind = "own"  # a rank inside train_func has finished the setup
        self.happened.add(kind)
        if kind == "setup":
            rank.event_queue = deque(item for item in rank.event_queue if not isinstance(item, e.Entered))
        flags = {"in_setup": kind == "setup", "can_retry": kind == "retried"}
        error = broken(at=at) if kind == "collective" else failed(f"of {rank.number}", at, **flags)
        rank.leave(error)

    @action(lambda self: self._alive(), index=RANKS, loses_unsent=(False, True))
    def a_process_dies(self, index: int, loses_unsent: bool) -> None:
        self.happened.add("died")
        self._one_of(self._alive(), index).die("killed", loses_unsent=loses_unsent)

    @action(lambda self: len(self._alive()) > 1, index=RANKS, loses_unsent=(False, True))
    def two_processes_die_at_once(self, index: int, loses_unsent: bool) -> None:
        self.happened.add("died")
        for rank in (self._one_of(self._alive(), index), self._one_of(self._alive(), index + 1)):
            rank.die("killed", loses_unsent=loses_unsent)

    @action(lambda self: any(not rank.is_preempted for rank in self._inside()), index=RANKS)
    def a_process_gets_sigterm(self, index: int) -> None:
        rank = self._one_of([rank for rank in self._inside() if not rank.is_preempted], index)
        rank.is_preempted = True
        rank.event_queue.append(e.Preempted("SIGTERM"))

    @action(lambda self: self._inside(), index=RANKS, within_s=(None, 3, 60))
    def a_node_drains(self, index: int, within_s: float | None) -> None:
        rank = self._one_of(self._inside(), index)
        self.attempts[-1].preempted.add(rank.number)
        self.run.feed(c.NodeDraining(self.run.attempt, (rank.number,), within_s))
        self._check()

    @action(lambda self: any(rank.sees_stop for rank in self._acting()), index=RANKS)
    def a_rank_sees_the_stop(self, index: int) -> None:
        self._one_of([rank for rank in self._acting() if rank.sees_stop], index).leave(SAW_STOP)

    @action(lambda self: self._acting(), index=RANKS)
    def a_rank_gets_stuck(self, index: int) -> None:
        self._one_of(self._acting(), index).is_stuck = True

    @action(lambda self: any(rank.was_ended and not rank.is_stuck for rank in self._inside()), index=RANKS)
    def a_rank_leaves_its_ended_attempt(self, index: int) -> None:
        self._one_of([rank for rank in self._inside() if rank.was_ended and not rank.is_stuck], index).leave(e.Ended())

    @action(lambda self: self._with_events(), index=RANKS, count=range(1, 6))
    def events_of_a_rank_arrive(self, index: int, count: int) -> None:
        rank = self._one_of(self._with_events(), index)
        for _ in range(min(count, len(rank.event_queue))):
            self._deliver(rank)

    @action(lambda self: self._with_events(), backwards=(False, True))
    def all_events_arrive(self, backwards: bool) -> None:
        """Connections keep the order of their own events; those of several ranks arrive in any order."""
        for rank in self._with_events()[:: -1 if backwards else 1]:
            while rank.event_queue:
                self._deliver(rank)

    @action(lambda self: len(self.attempts) > 1, event=(RETURNED, saved(), part(), failed(), reports(0), e.Ended()))
    def an_event_of_a_previous_attempt_arrives(self, event: e.WorkerEvent) -> None:
        assert self.run.deliver(0, event, attempt=self.run.attempt - 1) == []

    @action(lambda self: self.storing, succeeds=(False, True))
    def memory_is_written(self, succeeds: bool) -> None:
        manifest = self.storing.pop(0)
        self.run.feed(c.MemoryCopyStored(manifest) if succeeds else c.MemoryCopyNotStored(manifest.number, "disk full"))
        self._check()

    @action(lambda self: self.in_flight, succeeds=(True, True, True, False))
    def storage_answers(self, succeeds: bool) -> None:
        self._answer(succeeds)

    @action()
    def time_passes(self) -> None:
        self.run.advance(0.03)
        self._check()

    @action()
    def much_time_passes(self) -> None:
        self.run.advance(3)
        self._check()

    @action(by_s=(-86400.0, -2.0, 2.0, 86400.0))
    def the_clock_is_corrected(self, by_s: float) -> None:
        self.run.clock_error_s += by_s
        self.run.was_clock_corrected = True

    @action(cancel=(False, True), luck=range(8))
    def a_user_stops_the_run(self, cancel: bool, luck: int) -> None:
        if luck:
            return
        self.happened.add("cancelled" if cancel else "stopped")
        self.run.stop(cancel=cancel)
        self._check()

    @action(luck=range(6))
    def a_user_interrupts_the_run(self, luck: int) -> None:
        if not luck:
            self.is_interrupted = True
            self.happened |= {"stopped", "cancelled"}  # by the ranks, or once the grace is over
            self.run.stop(grace_s=30.0)
            self._check()

    @action(luck=range(4))
    def a_user_pauses_the_run(self, luck: int) -> None:
        if not luck:
            self.should_pause = True
            self.run.feed(c.PauseRequested())
            self._check()

    @action()
    def a_user_resumes_the_run(self) -> None:
        self.should_pause = False
        self.run.feed(c.ResumeRequested())
        self._check()

    @action(luck=range(8), num_written=range(5), flushed=(0.0, 0.3, 0.7, 1.0))
    def the_controller_dies(self, luck: int, num_written: int, flushed: float) -> None:
        """All workers die with the controller; a new one resumes from the files of the run.

        Args:
            luck: 0: it happens.
            num_written: How many of the writes that were not answered have happened: the old controller did not see them.
            flushed: How much is on storage of what the journal got since its last flush.
        """
        if luck or self.run.is_closed:
            return
        self.happened.add("died")
        self.should_pause = False
        self.storage.write(num_written)
        for command in self.storage.die(self.run, flushed):
            self.num_lost += isinstance(command, c.RecordEvent) and command.kind in _COUNTED
        self.num_checked = len(self.run.commands)
        self.in_flight, self.storing, self.held = [], [], None
        for attempt in self.attempts:
            attempt.gone = {rank.number for rank in attempt.ranks}
            attempt.killed |= attempt.preempted
            for rank in attempt.ranks:
                rank.has_left, rank.died = True, rank.died or "with the controller"
                rank.event_queue.clear()
                rank.unwritten.clear()
        if self.attempts:
            self.attempts[-1].is_entered = True  # nothing shows that no rank entered
        past = previous_state_of(self.run, self.storage.checkpoints.values())
        self.storage.checkpoints = {manifest.number: manifest for manifest in past.manifests}
        self.on_storage = {manifest.number: manifest.iteration for manifest in past.manifests}
        if self.attempts:  # the number of the last attempt is not in the journal alone
            entered = self.attempts[-1].entered
            past = past.up_to(
                AttemptRecord("run", entered.attempt, len(self.attempts[-1].ranks), entered.start.iteration)
            )
        # Parts of uncommitted checkpoints stay on storage, so that their numbers are known.
        self.run.restart(replace(past, last_number=max([past.last_number, *self.numbers])))
        self._check()

    # -- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Complete everything that is pending, and check that the run has ended."""
        if not hasattr(self, "run"):
            return
        for _ in range(2000 * self.scale):
            if self.run.is_closed:
                break
            self._complete_next()
        assert self.run.is_closed, f"still {self.run.machine.state}"
        last = self.attempts[-1] if self.attempts else None
        check_outcome(self.run, last, happened=self.happened, max_failures=self.max_failures)
        self.storage.write()
        stored = self.storage.checkpoints.values()
        history = history_of(self.run, max_failures=self.max_failures, on_storage=stored)
        violations = find_violations(history)
        assert not violations, violations
        self.steps.check(history)

    def _complete_next(self) -> None:
        if isinstance(self.run.machine.state, Paused):
            self.a_user_resumes_the_run()
        elif self._is_waiting_for_workers():
            self.workers_are_ready()
        elif self._with_events():
            self._deliver(self._with_events()[0])
        elif self.in_flight:
            self._answer(succeeds=True)
        elif self.storing:
            self.memory_is_written(succeeds=True)
        elif writing := [rank for rank in self._writing() if rank.is_waiting]:
            writing[0].event_queue.append(part(writing[0].unwritten.pop(0)))
        elif leaving := [rank for rank in self._leaving() if not (rank.is_stuck and rank.was_ended)]:
            for rank in leaving:
                rank.leave(e.Ended() if rank.was_ended else RETURNED)
        else:
            self.much_time_passes()

    # -- checks of each command ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        new, self.num_checked = self.run.commands[self.num_checked :], len(self.run.commands)
        for command in new:
            assert not self.is_over
            self.is_over = isinstance(command, c.CloseRun)
            getattr(self, f"_check_{type(command).__name__}", lambda _: None)(command)
        assert len(self.run.all_of(c.PublishOutcome)) <= 1
        allowed = (
            self.max_failures + 1 + len(self.run.events("regroup")) + len(self.run.events("resumed")) + self.num_lost
        )
        assert self.max_failures < 0 or self.num_prepared <= allowed

    def _check_PrepareGroup(self, command: c.PrepareGroup) -> None:  # noqa: N802
        assert command.attempt == self._num_entered() + 1
        self.num_prepared += 1
        assert all(commit.manifest.number in self.from_memory for commit in self.in_flight), "others are awaited"
        assert all(len(attempt.gone) == len(attempt.ranks) for attempt in self.attempts)
        self._check_preempted_were_killed()

    def _check_CloseRun(self, command: c.CloseRun) -> None:  # noqa: N802
        self._check_preempted_were_killed()

    def _check_preempted_were_killed(self) -> None:
        assert all(attempt.preempted <= attempt.killed for attempt in self.attempts)

    def _check_RecordEvent(self, command: c.RecordEvent) -> None:  # noqa: N802
        if command.kind == "failure" and command.data["ranks"] and self.attempts:
            assert not set(command.data["ranks"]) <= self.attempts[-1].preempted

    def _check_StartAttempt(self, command: c.StartAttempt) -> None:  # noqa: N802
        assert command.attempt == self._num_entered() + 1
        newest = max(self.on_storage, default=None)
        if command.start.held is not None:
            assert self.held is not None and command.start.held.number == self.held.number >= (newest or 0)
            assert command.start.iteration == command.start.held.iteration
            assert command.start.uri == (uri_of(newest) if newest == command.start.held.number else None)
        elif newest is None:
            assert (command.start.uri, command.start.iteration) == (self.start.uri, self.start.iteration)
        else:
            assert (command.start.uri, command.start.iteration) == (uri_of(newest), self.on_storage[newest])
        assert command.first_number > max(self.numbers, default=0)
        self.attempts.append(SimulatedAttempt(command, [SimulatedRank(number) for number in range(self.run.num_ranks)]))
        self.steps.begin(command)
        for rank in self.attempts[-1].ranks:
            rank.event_queue.append(e.Entered(self.run.now))

    def _check_EndAttempt(self, command: c.EndAttempt) -> None:  # noqa: N802
        assert command.attempt == self.run.attempt
        if command.why == "the group grows":
            self._check_growth()
        for number in command.ranks:
            assert number not in self.attempts[-1].gone
            rank = self.attempts[-1].ranks[number]
            rank.was_ended, rank.last_save, rank.is_waiting = True, None, False

    def _check_growth(self) -> None:
        """Check that all ranks wait after the same save, and that its checkpoint is stored and the newest."""
        attempt = self.attempts[-1]
        assert not attempt.returned
        if not (saves := {rank.last_save for rank in self._inside()}):  # all ranks died, which is not published yet
            return
        (last,) = saves
        number = 0 if self.held is None else self.held.number
        assert last is not None and attempt.entered.first_number + last == max([*self.on_storage, number])

    def _check_ReleaseWorkers(self, command: c.ReleaseWorkers) -> None:  # noqa: N802
        """Check that no rank is inside, and that checkpoints in memory were stored where possible."""
        assert self.should_pause and not self.in_flight
        waiting = {manifest.number for manifest in self.storing} - self.lost
        assert all(number < max(self.on_storage) for number in waiting), "a newer one is on storage"
        assert all(len(attempt.gone) == len(attempt.ranks) for attempt in self.attempts)
        self._check_preempted_were_killed()
        self.should_pause = False

    def _check_AgreeOnSavePoint(self, command: c.AgreeOnSavePoint) -> None:  # noqa: N802
        is_wanted = self.is_elastic or self.attempts[-1].preempted or self.should_pause or self.is_interrupted
        assert command.attempt == self.run.attempt and is_wanted
        for rank in self._inside():
            rank.last_save, rank.point = max(other.num_calls for other in self._inside()), command.point

    def _check_RequestStop(self, command: c.RequestStop) -> None:  # noqa: N802
        assert command.ends_reports or self.attempts[-1].preempted or self.is_interrupted
        for rank in self._inside():
            rank.sees_stop = True

    def _check_CancelSavePoint(self, command: c.CancelSavePoint) -> None:  # noqa: N802
        assert command.attempt == self.run.attempt
        for rank in self._inside():
            rank.last_save, rank.is_waiting = None, False

    def _check_KillWorkers(self, command: c.KillWorkers) -> None:  # noqa: N802
        for number in command.ranks:
            attempt, rank = self.attempts[-1], self.attempts[-1].ranks[number]
            attempt.killed.add(number)
            if len(attempt.gone) == len(attempt.ranks):
                assert number in attempt.preempted
                continue
            assert rank.was_ended and number not in attempt.gone
            rank.die("killed", loses_unsent=True)

    def _check_CommitCheckpoint(self, command: c.CommitCheckpoint) -> None:  # noqa: N802
        attempt, number = self.attempts[-1], command.manifest.number
        self.storage.request(self.run, command)
        if number in self.from_memory:
            self.in_flight.append(command)
            return
        call = number - attempt.entered.first_number
        callers = attempt.saved.get(call, {})
        assert command.manifest.attempt == attempt.entered.attempt
        assert {rank.number for rank in attempt.ranks} - attempt.returned <= set(callers)
        assert 0 in callers and set(callers) <= attempt.safe.get(call, set())
        made_at = attempt.entered.start.iteration + callers[min(callers)].reports
        is_scored = command.manifest.iteration == made_at + 1  # the round was complete before the parts
        assert is_scored or command.manifest.iteration == made_at
        if is_scored:
            self.amended.add(number)
        assert number > max(self.numbers, default=0)
        self.numbers.append(number)
        self.in_flight.append(command)

    def _check_WriteRound(self, command: c.WriteRound) -> None:  # noqa: N802
        number = command.manifest.number
        assert number not in self.amended
        self.amended.add(number)
        self.on_storage[number] += 1
        assert command.manifest.iteration == self.on_storage[number]
        self.storage.request(self.run, command)

    def _check_PublishOutcome(self, command: c.PublishOutcome) -> None:  # noqa: N802
        self.storage.flush(self.run, before=command)

    def _check_KeepInMemory(self, command: c.KeepInMemory) -> None:  # noqa: N802
        assert self.held is None or command.number > self.held.number
        self.held = command

    def _check_StoreFromMemory(self, command: c.StoreFromMemory) -> None:  # noqa: N802
        number = command.manifest.number
        assert self.held is not None and number == self.held.number > max(self.on_storage, default=0)
        self.storing.append(command.manifest)
        self.from_memory.add(number)

    def _check_DeleteCheckpoint(self, command: c.DeleteCheckpoint) -> None:  # noqa: N802
        assert command.number in self.on_storage and command.number != max(self.on_storage)
        self.storage.request(self.run, command)
        del self.on_storage[command.number]
        assert self.num_to_keep is not None and len(self.on_storage) >= self.num_to_keep

    def _check_EmitFrame(self, command: c.EmitFrame) -> None:  # noqa: N802
        frame = Frame(0, command.kind, command.attempt, command.rank, command.data, command.rows)
        before = self.results[-1] if self.results else None
        for result in self.merger.feed(frame):
            entered = self.attempts[-1].entered
            is_first = before is None or before["attempt"] != result["attempt"]
            number = entered.start.iteration if is_first else before["training_iteration"]  # type: ignore[index]
            assert (result["training_iteration"], result["attempt"]) == (number + 1, entered.attempt)
            self.results.append(result)
            before = result

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _is_waiting_for_workers(self) -> bool:
        return isinstance(self.run.machine.state, Preparing) and self.num_answered < self.num_prepared

    def _num_entered(self) -> int:
        """Return the number of attempts in which a rank entered train_func."""
        return sum(attempt.is_entered for attempt in self.attempts)

    def _ranks(self) -> list[SimulatedRank]:
        return self.attempts[-1].ranks if self.attempts else []

    def _inside(self) -> list[SimulatedRank]:
        return [rank for rank in self._ranks() if not rank.has_left]

    def _acting(self) -> list[SimulatedRank]:
        """Return the ranks that run the code of train_func."""
        return [rank for rank in self._inside() if not rank.is_waiting]

    def _leaving(self) -> list[SimulatedRank]:
        """Return the ranks that may leave: their attempt was ended, or they do not wait at a save point."""
        return [rank for rank in self._inside() if rank.was_ended or not rank.is_waiting]

    def _alive(self) -> list[SimulatedRank]:
        """Return the ranks whose process can still die before its event stream ends."""
        return [rank for rank in self._ranks() if rank.died is None and (not rank.has_left or rank.event_queue)]

    def _writing(self) -> list[SimulatedRank]:
        return [rank for rank in self._inside() if rank.unwritten]

    def _with_events(self) -> list[SimulatedRank]:
        return [rank for rank in self._ranks() if rank.event_queue]

    @staticmethod
    def _one_of(ranks: list[SimulatedRank], index: int) -> SimulatedRank:
        return ranks[index % len(ranks)]

    def _save(self, rank: SimulatedRank, is_written: bool) -> None:
        if rank.last_save is not None and rank.num_calls > rank.last_save:
            return  # the rank waits at the beginning of the call
        call, rank.num_calls = rank.num_calls, rank.num_calls + 1
        if call == 0:
            rank.saves_first = rank.num_reports == 0
            rank.first_save_after = rank.num_reports
            self._note_uneven_saves()
        if rank.saves_first:
            rank.unscored = call
        rank.event_queue.append(self.steps.save(self.attempts[-1].entered, rank, call))
        if rank.number == 0 and self.stored_every:
            rank.event_queue.append(e.PartHeld(call, 10))
        number = self.attempts[-1].entered.first_number + call
        if rank.number == 0 and self.stored_every and number % self.stored_every:
            pass  # in memory only
        elif is_written and not rank.unwritten:
            rank.event_queue.append(part(call))
        else:
            rank.unwritten.append(call)
        rank.wait_if_due()

    def _note_uneven_saves(self) -> None:
        """Record a rank whose first save comes rounds after that of another: it counts as a rank without saves."""
        first = [rank.first_save_after for rank in self._ranks() if rank.first_save_after is not None]
        made = [rank.num_reports if rank.first_save_after is None else rank.first_save_after for rank in self._ranks()]
        if first and max(made) > min(first) + 1:
            self.happened.add("one-sided")

    def _deliver(self, rank: SimulatedRank) -> None:
        attempt, item = self.attempts[-1], rank.event_queue.popleft()
        if item is GONE:
            attempt.gone.add(rank.number)
            self.run.end_stream(rank.number, rank.died)
        else:
            attempt.record(rank.number, item)
            self.run.deliver(rank.number, item)
        self._check()

    def _answer(self, succeeds: bool) -> None:
        commit = self.in_flight.pop(0)
        manifest = commit.manifest
        self.storage.answer(commit, succeeds=succeeds)
        if succeeds:
            self.on_storage[manifest.number] = manifest.iteration
            self.run.feed(c.CheckpointCommitted(manifest))
        else:
            self.happened.add("write failed")
            self.run.feed(c.CommitFailed(manifest.number, "disk full"))
        self._check()
