"""What a run's machine does, whatever input led to it: the steps from one state to the next. Pure.

`raysgd.controller.machine` says which input leads to which of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.controller import commands as c
from raysgd.controller import frames, notes
from raysgd.controller.desk import CheckpointDesk
from raysgd.controller.failure_policy import Failure
from raysgd.controller.growth import Growth
from raysgd.controller.past import Past
from raysgd.controller.pausing import Pausing
from raysgd.controller.plan import RunPlan
from raysgd.controller.preemption import Preemption
from raysgd.controller.retries import Retries
from raysgd.controller.savepoint import SavePoint
from raysgd.controller.states import (
    Closed,
    Closing,
    Ending,
    Outcome,
    Paused,
    Preparing,
    Running,
    State,
    name_of,
    running_of,
)
from raysgd.controller.verdict import Evidence, judge

#: Seconds the errors of other ranks have to arrive after the first one, so that a broken collective is not told for it.
GATHER_S = 0.05
#: Seconds a broken collective waits for the death or the exception that explains it. Ray tells of a process on a lost node
#: later than of one that died alone, and on a busy machine later still.
EXPLAIN_S = 5.0


class Moves:
    """One run's state, and how it changes. ``uri_of`` gives the folder of a checkpoint by its number; ``clock`` seconds
    since the epoch.

    Attributes:
        desk: Knows its checkpoints.
    """

    def __init__(self, plan: RunPlan, *, uri_of: Callable[[int], str], clock: Callable[[], float]) -> None:
        self.state: State = Preparing(attempt=1)
        self._plan = plan
        self._clock = clock
        self._nodes: tuple[str, ...] = ()
        self._is_stopping = False
        self._why_stopped = ""
        self._is_told = False
        self._commands: list[c.Command] = []
        self._savepoint = SavePoint(self._out, is_inside=plan.recovers_inside)
        self.desk = CheckpointDesk(plan, uri_of=uri_of, out=self._out, on_held=self._savepoint.committed)
        self._retries = Retries(plan.failure, self._out)
        self._growth = Growth(self._savepoint, clock, self._out)
        self._preemption = Preemption(self._savepoint, plan.failure.preemption_grace_s, self._out)
        self._pausing = Pausing(self._savepoint)
        self._parked: tuple[int, ...] | None = ()
        self._is_ahead = False  # ranks that wait have come further than the newest checkpoint
        self._reached = (0, 0.0)  # iterations and seconds of training, where train_func goes on after an attempt

    @property
    def is_to_rest(self) -> bool:
        """Whether a rest was asked for, and has not come yet."""
        return self._pausing.is_wanted

    def standing(self) -> dict[str, Any]:
        """How the run stands, as far as that is known here; see `raysgd.result.RunStatus`."""
        running = running_of(self.state)
        return {
            "state": name_of(self.state),
            "world_size": 0 if running is None or isinstance(self.state, Closing) else running.num_ranks,
            "iteration": self.desk.newest_iteration(),
            "num_failures": self._retries.count,
            "checkpoint": self.desk.newest_uri,
        }

    # -- the beginning --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._plan.past is None:
            self._out(c.PrepareGroup(1))
        else:
            self._go_on(self._plan.past)

    def _go_on(self, past: Past) -> None:
        """After the death of the controller's process, which ended all workers: a failure, unless the run had no more to do."""
        self._out(c.Note("controller_restart", {"attempt": past.attempt}))
        self._retries.remember(past.failures)
        self.desk.go_on(past)
        if past.is_open:
            keep = self.desk.end_attempt(past.iterations_before)
            self._out(c.Say(frames.ATTEMPT_END, past.attempt, data={"keep_rounds": keep}))
        self.state = Preparing(past.attempt + 1)
        if past.kind is not None:
            self._is_told = True
            self._close(Outcome(past.kind))
        elif past.why_cancelled is not None:
            self._close(Outcome("cancelled", message=past.why_cancelled))
        elif past.why_stopped is not None:
            self._close(Outcome("stopped", message=past.why_stopped))
        elif past.is_paused:
            self.state = Paused(past.attempt + 1, 1)
        else:
            self._retry_or_give_up(Failure((), "the controller's process died, and all workers with it"), past.attempt)

    # -- from one attempt to the next -----------------------------------------------------------------------------

    def _end_attempt(self, running: Running, why: str, preset: Outcome | None = None) -> None:
        self.state = Ending(running, preset)
        self._savepoint.forget()
        self._out(c.EndRanks(running.attempt, tuple(sorted(running.inside)), why, goes_on=preset is None))
        self._out(c.SetTimer("gather", running.serial, GATHER_S))
        self._out(c.SetTimer("grace", running.serial, self._plan.failure.abort_grace_s))

    def _kill_the_slow(self, running: Running) -> None:
        if not running.inside:
            return
        slow = tuple(sorted(running.inside))
        if isinstance(self.state, (Ending, Closing)):
            self.state.killed |= running.inside
        self._out(notes.killed_for_staying(slow))
        self._out(c.KillRanks(slow))

    def _settle(self, *, is_complete: bool) -> None:
        """Say why the attempt ended and what follows, or wait for what would explain a broken collective."""
        assert isinstance(self.state, Ending)
        ending = self.state
        parked = frozenset(ending.running.parked)
        evidence = Evidence(ending.failures, ending.arrived, ending.deaths, self._nodes, is_complete, parked)
        verdict = ending.preset or judge(evidence)
        if verdict is None:
            self._out(c.SetTimer("explain", ending.running.serial, EXPLAIN_S))
        elif isinstance(verdict, Outcome):
            self._say_attempt_end(ending.running)
            self._close(verdict, ending.running, ending.killed)
        else:
            self._retry_or_give_up(verdict, ending.running.attempt)
        if verdict is not None and ending.is_grace_over:
            self._kill_the_slow(ending.running)

    def _retry_or_give_up(self, failure: Failure, attempt: int) -> None:
        ending = self.state if isinstance(self.state, Ending) else None
        is_excused = self._preemption.excuses(failure, attempt)
        give_up = None if is_excused else self._retries.note(failure, is_stopping=self._is_stopping)
        if give_up is None and not self._is_stopping:
            if ending is not None:
                ending.is_settled = True
            else:
                self._prepare_again()
            return
        if ending is not None:
            self._say_attempt_end(ending.running)
        outcome = self._retries.given_up(give_up, self.desk.last_checkpoint) if give_up else self._stopped()
        self._close(outcome, ending.running if ending else None, ending.killed if ending else set())

    def _prepare_again(self) -> None:
        """Ask for workers, at once or after a while; the attempt's number is still free if nobody entered train_func."""
        before = running_of(self.state) or self.state
        assert isinstance(before, (Preparing, Running))
        was_entered = isinstance(before, Running) and before.is_entered
        self._preemption.carry_out()
        if isinstance(before, Running):
            self._note_parked(before)
        self.state = Preparing(before.attempt + was_entered, before.serial + 1)
        if self._pausing.is_wanted and self._can_rest:
            self._rest(self.state)
        elif pause_s := self._retries.pause_s(was_entered=was_entered):
            self._out(c.SetTimer("pause", self.state.serial, pause_s))
        else:
            self._prepare()

    def _note_parked(self, before: Running) -> None:
        """train_func goes on where it is, not at the newest checkpoint, on those ranks that have not left it."""
        self._parked = tuple(sorted(before.parked))
        iteration = max(before.iterations_before + self.desk.num_rounds, self.desk.newest_iteration())
        taken = before.parked[self._parked[0]] if self._parked else None
        if taken is not None:  # all take the state of the first
            iteration = min(iteration, taken)
        self._is_ahead = taken is not None and iteration > self.desk.newest_iteration()
        self._reached = iteration, before.time_before_s + self._clock() - before.begun_s

    @property
    def _can_rest(self) -> bool:
        """Whether nothing is lost if all workers go now."""
        return not self.desk.has_unstored and not self._is_ahead

    def _rest(self, before: Preparing) -> None:
        self._pausing.is_wanted = False
        self._parked = ()
        self.state = Paused(before.attempt, before.serial)
        self._out(c.ReleaseWorkers())
        self._out(c.Note("paused", {"attempt": before.attempt}))

    def _wake_up(self, paused: Paused) -> None:
        self.state = Preparing(paused.attempt, paused.serial + 1)
        self._out(c.Note("resumed", {"attempt": paused.attempt}))
        self._prepare()

    def _prepare(self) -> None:
        assert isinstance(self.state, Preparing)
        self._out(c.PrepareGroup(self.state.attempt, self.desk.is_bound_to_size, self._parked))
        self._parked = None  # for another try

    def _leave_after_save(self, running: Running) -> None:
        if self.desk.is_bound_to_size and self._preemption.why is None and not self._pausing.is_wanted:
            self._savepoint.call_off()
            self._growth.refuse()
        else:
            self._regroup(running, self._preemption.why or self._savepoint.why or "")

    def _regroup(self, running: Running, why: str) -> None:
        self._out(c.Note("regroup", {"attempt": running.attempt, "why": why}))
        if isinstance(self.state, Running):
            self._end_attempt(running, why)
        assert isinstance(self.state, Ending)
        self.state.is_settled = True

    def _say_attempt_end(self, running: Running) -> None:
        keep = self.desk.end_attempt(running.iterations_before)
        self._out(c.Say(frames.ATTEMPT_END, running.attempt, data={"keep_rounds": keep}))

    # -- the end --------------------------------------------------------------------------------------------------

    def _stopped(self) -> Outcome:
        return Outcome("stopped", message=self._why_stopped)

    def _close(self, outcome: Outcome, running: Running | None = None, killed: set[int] | None = None) -> None:
        self.state = Closing(outcome, running, set(killed or ()))
        if self._plan.recovers_inside and running is not None and running.inside:
            self._out(c.EndRanks(running.attempt, tuple(sorted(running.inside)), "the run is over", goes_on=False))
        if outcome.kind == "error":  # raised first, cleaned up after
            self._tell(outcome)

    def _tell(self, outcome: Outcome) -> None:
        if not self._is_told:
            self._is_told = True
            self._out(c.TellOutcome(outcome))

    def _move_on(self) -> None:
        """Leave Ending for the next attempt or a rest, Closing for good, once nothing is inside and nothing being written."""
        if isinstance(self.state, Running) and self._savepoint.is_due(self.state.inside):
            self._leave_after_save(self.state)
        if not self.desk.is_idle:
            return
        if isinstance(self.state, Ending) and self.state.is_settled and not self.state.running.inside:
            if self._pausing.is_wanted and self.desk.store_held():  # memory goes with the workers
                return
            self._say_attempt_end(self.state.running)
            self._prepare_again()
        elif isinstance(self.state, Closing) and not (self.state.running and self.state.running.inside):
            if self.desk.store_held():  # only now: nobody writes it any more who would have
                return
            self._tell(self.state.outcome)
            self._preemption.carry_out()
            self.state = Closed(self.state.outcome)
            self._out(c.Close())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _running(self, attempt: int) -> Running | None:
        """The data of attempt ``attempt``, if it is the current one and not over."""
        running = running_of(self.state)
        return running if running is not None and running.attempt == attempt else None

    def _running_alone(self) -> Running | None:
        """The current attempt, if nothing but training goes on: no stop, and no rank that has returned."""
        is_alone = isinstance(self.state, Running) and self.state.is_whole and not self._is_stopping
        return running_of(self.state) if is_alone else None

    def _out(self, command: c.Command) -> None:
        self._commands.append(command)

    def _take(self) -> list[c.Command]:
        taken, self._commands = self._commands, []
        return taken
