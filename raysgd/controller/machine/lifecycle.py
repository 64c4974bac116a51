"""The state of a run and the transitions between its states. Pure; `raysgd.controller.states` has the table.

`RunLifecycle` does what every transition needs, whatever input led to it. `raysgd.controller.machine.machine` decides which
input leads to which transition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.checkpoints.coordinator import CheckpointCoordinator
from raysgd.controller.machine.regrouping import GROWS, Growth, Pause, Preemption, RegroupCause, SavePoint
from raysgd.controller.policies.failure import Failure, FailurePolicy, find_cause
from raysgd.controller.run_plan import PreviousState, RunPlan
from raysgd.controller.states import (
    Closed,
    Closing,
    Death,
    Ending,
    Outcome,
    Paused,
    Preparing,
    Running,
    State,
    running_of,
)
from raysgd.session.events import Failed

#: Seconds for the errors of other ranks to arrive after the first one, so that a broken collective is not taken for the cause.
GATHER_S = 0.05
#: Seconds that a broken collective waits for the death or exception that explains it. Ray reports a process on a lost node
#: later than one that died alone, and later still on a busy machine.
EXPLAIN_S = 5.0
#: Seconds, at least, for ranks to leave from a save point. They leave by themselves, on a busy machine slowly: killing them
#: would cost a start of their processes. A rank that died or hangs is found in other ways.
SAVE_POINT_GRACE_S = 30.0


class RunLifecycle:
    """One run's state. Each transition sends commands through ``emit``; other arguments are those of `RunMachine`.

    Attributes:
        stop_reason: Why the run was asked to stop; None if it was not.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        uri_of: Callable[[int], str],
        clock: Callable[[], float],
        emit: Callable[[c.Command], None],
    ) -> None:
        self.state: State = Preparing(attempt=1)
        self.stop_reason: str | None = None
        self.failures = FailurePolicy(plan.failure)
        self.save_point = SavePoint(emit)
        self.checkpoints = CheckpointCoordinator(
            plan, uri_of=uri_of, emit=emit, on_in_memory=self.save_point.on_committed
        )
        self.growth = Growth(self.save_point, clock, emit)
        self.preemption = Preemption(self.save_point, plan.failure.preemption_grace_s, emit)
        self.pause = Pause(self.save_point)
        self._plan = plan
        self._clock = clock
        self._emit = emit
        self._is_published = False
        self._missing = c.MetricsMissing(())
        self._warned_of_missing = False
        self._warned_of_unsynchronized = False

    @property
    def is_stopping(self) -> bool:
        return self.stop_reason is not None

    def attempt_if_current(self, attempt: int) -> Running | None:
        """Return attempt number ``attempt`` if it is the current one and not over."""
        running = running_of(self.state)
        return running if running is not None and running.attempt == attempt else None

    def undisturbed_attempt(self) -> Running | None:
        """Return the current attempt if all ranks train: none has left, and no stop was requested."""
        is_undisturbed = isinstance(self.state, Running) and self.state.has_all_ranks and not self.is_stopping
        return running_of(self.state) if is_undisturbed else None

    # -- metrics that are never reported ------------------------------------------------------------------------------

    def on_metrics_missing(self, given: c.MetricsMissing) -> None:
        """Warn after the first round: a name may be wrong, or be reported in some rounds only."""
        self._missing = given
        if given.names and given.is_round_complete and not self._warned_of_missing:
            self._warned_of_missing = True
            self._emit(
                c.warning(
                    f"the reports of the first round have no {given.described}. A later round may have it; without it, "
                    "nothing is reduced by this name."
                )
            )

    def _warn_of_missing(self, outcome: Outcome) -> None:
        """Warn at the end of a success without a metric that ``reduce`` names. Hours of training do not fail by a name."""
        if self._missing.names and outcome.is_success:
            self._emit(
                c.warning(
                    f"no report of the run had {self._missing.described}. raysgd.load_run(run_dir, reduce={{...}}) reduces what "
                    "was reported."
                )
            )

    # -- Preparing ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the run, or resume it from what an earlier controller process left."""
        if self._plan.previous is None:
            self._emit(c.PrepareGroup(1))
        else:
            self._resume_after_restart(self._plan.previous)

    def _resume_after_restart(self, previous: PreviousState) -> None:
        """The death of the controller's process ended all workers: a failure, unless the run had nothing more to do."""
        self._emit(c.RecordEvent("controller_restart", {"attempt": previous.attempt}))
        self.failures.restore(previous.failures)
        self.checkpoints.restore(previous)
        if previous.is_open:
            self.emit_attempt_end(previous)
        self.state = Preparing(previous.attempt + 1)
        self._is_published = previous.published is not None
        if (outcome := previous.published or previous.requested) is not None:
            self.close(outcome)
        elif previous.is_paused:
            self.state = Paused(previous.attempt + 1, 1)
        else:
            self.retry_or_give_up(
                Failure((), "the controller's process died, and all workers with it"), previous.attempt
            )

    def prepare(self) -> None:
        """Request workers for the next attempt."""
        assert isinstance(self.state, Preparing)
        self._emit(c.PrepareGroup(self.state.attempt, self.checkpoints.is_bound_to_size))

    def start_attempt(self, nodes: tuple[str, ...], num_joining: int) -> None:
        """The group is ready: call train_func on all ranks."""
        assert isinstance(self.state, Preparing)
        attempt, world_size = self.state.attempt, len(nodes)
        start, first_number = self.checkpoints.begin_attempt(attempt, world_size)
        self.state = Running(attempt, self.state.serial, start.iteration, nodes, set(range(world_size)))
        self.growth.on_group_formed(self.state, num_joining)
        self.save_point.request(self.state, self.pause.why)
        data = {
            "attempt": attempt,
            "world_size": world_size,
            "iterations_before": start.iteration,
            "time_before_s": start.time_total_s,
        }
        of_frame = {**data, "workers_per_replica": self._plan.workers_per_replica}
        self._emit(c.EmitFrame(frames.ATTEMPT, attempt, data=of_frame))
        place = {"checkpoint": start.uri, "memory": None if start.held is None else start.number}
        self._emit(c.RecordEvent("attempt_start", {**data, **place}))
        self._emit(c.StartAttempt(attempt, start, first_number))

    # -- Running ------------------------------------------------------------------------------------------------------

    def on_entered(self, running: Running) -> None:
        """A rank has entered train_func, which uses up the attempt's number."""
        running.is_entered = True

    def on_unsynchronized(self, running: Running, rank: int, message: str) -> None:
        """Warn once in a run, when all ranks train a model of their own: where some do not, others may train on purpose."""
        running.unsynchronized.add(rank)
        if not self._warned_of_unsynchronized and len(running.unsynchronized) == len(running.nodes):
            self._warned_of_unsynchronized = True
            self._emit(c.warning(message))

    def on_returned(self, running: Running, rank: int) -> None:
        """A rank has returned from train_func."""
        self._emit(c.EmitFrame(frames.RANK_DONE, running.attempt, rank))
        self.save_point.cancel()  # otherwise this rank would repeat all that it did after the save point

    def on_stopped(self, running: Running, rank: int) -> None:
        """A rank has left train_func without returning, because the run was asked to stop. The others leave too."""
        self._emit(c.EmitFrame(frames.RANK_DONE, running.attempt, rank))
        running.stopped.add(rank)
        if len(running.stopped) == 1:  # the others may wait for it in a collective
            ranks = tuple(sorted(running.active))
            self._emit(c.EndAttempt(running.attempt, ranks, "the run was asked to stop"))
            self._start_grace(running)

    def on_stream_ended(self, running: Running, rank: int) -> None:
        """A rank's last event has arrived, or its process died."""
        running.active.discard(rank)

    def record_stop(self, why: str) -> None:
        """Record that the run was asked to stop: no attempt follows the current one."""
        self.stop_reason = why
        self._emit(c.RecordEvent("stop", {"why": why}))

    # -- Ending -------------------------------------------------------------------------------------------------------

    def end_attempt(
        self, running: Running, why: str, preset: Outcome | None = None, *, is_at_save_point: bool = False
    ) -> None:
        """Make all ranks leave the attempt.

        Args:
            running: The attempt.
            why: The reason, for the user.
            preset: The outcome, if it does not depend on the errors of the ranks.
            is_at_save_point: The ranks wait at a save point, from which they leave by themselves.
        """
        self.state = Ending(running, preset)
        self.save_point.reset()
        self._emit(c.EndAttempt(running.attempt, tuple(sorted(running.active)), why))
        self._emit(c.SetTimer("gather", running.serial, GATHER_S))
        self._start_grace(running, at_least_s=SAVE_POINT_GRACE_S if is_at_save_point else 0.0)

    def _start_grace(self, running: Running, *, at_least_s: float = 0.0) -> None:
        """Limit the time that living ranks take to leave the attempt."""
        self._emit(c.SetTimer("grace", running.serial, max(self._plan.failure.abort_grace_s, at_least_s)))

    def on_grace_over(self, running: Running) -> None:
        """Kill the ranks that are still active, now or when the cause of the end is known."""
        state = self.state
        if isinstance(state, Ending) and not state.is_decided and state.preset is None:
            state.is_grace_over = True  # a rank that is still active may be dead, and the cause
        else:
            self.kill_active(running)

    def preset_outcome(self, outcome: Outcome) -> None:
        """End the run with this outcome once all ranks have left, whatever their errors are."""
        if isinstance(self.state, Ending):
            self.state.preset = outcome

    def ignore_death(self, rank: int) -> None:
        """Do not count the death of a process that is about to be killed."""
        if isinstance(self.state, Ending):
            self.state.killed.add(rank)

    def add_error(self, rank: int, failed: Failed) -> None:
        """Record the error of a rank, unless the cause of the end is decided already."""
        if isinstance(self.state, Ending) and not self.state.is_decided:
            self.state.errors.setdefault(rank, failed)
            self.state.arrived_at.setdefault(rank, self._clock())
            if not failed.in_collective:
                self._emit(c.SetTimer("gather", self.state.running.serial, GATHER_S))

    def add_death(self, rank: int, reason: str, *, is_hang: bool) -> None:
        """Record the death of a process, unless the cause of the end is decided already."""
        if isinstance(self.state, Ending) and not self.state.is_decided and rank not in self.state.killed:
            self.state.deaths.append(Death(rank, self._clock(), reason, is_hang))
            if not self.preemption.explains((rank,)):
                self.growth.on_worker_lost()
            self._emit(c.SetTimer("gather", self.state.running.serial, GATHER_S))

    def decide_after_attempt(self, *, is_complete: bool) -> None:
        """Decide why the attempt ended and what follows, or wait for what explains a broken collective.

        Args:
            is_complete: No further error or death is waited for.
        """
        assert isinstance(self.state, Ending)
        ending = self.state
        cause = ending.preset or find_cause(ending, is_complete=is_complete)
        if cause is None:
            self._emit(c.SetTimer("explain", ending.running.serial, EXPLAIN_S))
            return
        if isinstance(cause, Outcome):
            self.close(cause)
        else:
            self.retry_or_give_up(cause, ending.running.attempt)
        if ending.is_grace_over:
            self.kill_active(ending.running)

    def retry_or_give_up(self, failure: Failure, attempt: int) -> None:
        """Decide what follows a failure: another attempt, or the end of the run."""
        is_excused = self.preemption.excuses(failure, attempt)
        why_over = None if is_excused else self._count_failure(failure)
        if why_over is not None:
            outcome = failure.outcome or Outcome("error", error_type="WorkerDiedError", ranks=failure.ranks)
            message = f"{why_over}. {self.checkpoints.last_checkpoint}"
            self.close(replace(outcome, message=message, failures=self.failures.num_failures))
        elif self.is_stopping:
            self.close(self.stopped_outcome())
        elif isinstance(self.state, Ending):
            self.state.is_decided = True
        else:
            self._prepare_again()

    def _count_failure(self, failure: Failure) -> str | None:
        """Count and record a failure; returns why the run must end, or None."""
        why_over = self.failures.decide(failure)
        retry = "stop" if self.is_stopping else f"retry {self.failures.num_failures}"
        action = retry if why_over is None else "give up"
        data = {
            "ranks": list(failure.ranks),
            "nodes": list(failure.nodes),
            "error": failure.what,
            "action": action,
            "cause": failure.cause,
        }
        self._emit(c.RecordEvent("failure", data | ({"raised": failure.raised} if failure.raised else {})))
        return why_over

    def regroup(self, running: Running, why: str, cause: RegroupCause, *, is_at_save_point: bool = False) -> None:
        """End the attempt, so that another group can form. This does not count as a failure."""
        self._emit(c.RecordEvent("regroup", {"attempt": running.attempt, "why": why, "cause": cause}))
        if isinstance(self.state, Running):
            self.end_attempt(running, why, is_at_save_point=is_at_save_point)
        assert isinstance(self.state, Ending)
        self.state.is_decided = True

    def kill_active(self, running: Running) -> None:
        """Kill the processes of ranks that did not leave the attempt in time."""
        if not running.active:
            return
        ranks = tuple(sorted(running.active))
        if isinstance(self.state, Ending):
            self.state.killed |= running.active
        self._emit(c.warning(f"killed ranks {list(ranks)}: they did not leave their attempt in time"))
        self._emit(c.KillWorkers(ranks))

    def _prepare_again(self) -> None:
        """Prepare the next attempt, at once or after a delay. The attempt's number is reused if no rank entered train_func."""
        before = running_of(self.state) or self.state
        assert isinstance(before, (Preparing, Running))
        was_entered = isinstance(before, Running) and before.is_entered
        self.preemption.kill_preempted()
        self.state = Preparing(before.attempt + was_entered, before.serial + 1)
        if self.pause.is_requested and not self.checkpoints.has_unstored:
            self.pause_now(self.state)
        elif delay_s := self.failures.restart_delay_s(was_entered=was_entered):
            self._emit(c.SetTimer("restart", self.state.serial, delay_s))
        else:
            self.prepare()

    def emit_attempt_end(self, last: Running | PreviousState, *, keeps_all: bool = False) -> None:
        """Announce the end of an attempt, with the rounds that are part of its checkpoints, or with all rounds."""
        keep = self.checkpoints.end_attempt(last.iterations_before)
        self._emit(c.EmitFrame(frames.ATTEMPT_END, last.attempt, data={"keep_rounds": None if keeps_all else keep}))

    # -- Paused -------------------------------------------------------------------------------------------------------

    def pause_now(self, before: Preparing) -> None:
        """Release the workers until the run is resumed."""
        self.pause.begin()
        self.state = Paused(before.attempt, before.serial)
        self._emit(c.ReleaseWorkers())
        self._emit(c.RecordEvent("paused", {"attempt": before.attempt}))

    def resume(self) -> None:
        """Resume a paused run."""
        if isinstance(self.state, Paused):
            self._emit(c.RecordEvent("resumed", {"attempt": self.state.attempt}))
            self.state = Preparing(self.state.attempt, self.state.serial + 1)
            self.prepare()

    # -- Closing ------------------------------------------------------------------------------------------------------

    def stopped_outcome(self) -> Outcome:
        return Outcome("stopped", message=self.stop_reason or "")

    def close(self, outcome: Outcome) -> None:
        """End the run with this outcome. Ranks may still have to leave the current attempt."""
        if isinstance(self.state, Ending):
            self.emit_attempt_end(self.state.running)
            if (
                self.state.is_decided
            ):  # ranks that leave from a save point had more time than a user who ends the run waits
                self._start_grace(self.state.running)
        self.state = Closing(outcome, running_of(self.state))
        if outcome.kind == "error":  # the user gets it at once; cleaning up follows
            self._publish(outcome)

    def fail_success(self, outcome: Outcome) -> None:
        """Replace the outcome of a run that is closing with a success, because something failed after training."""
        if isinstance(self.state, Closing) and self.state.outcome.is_success:
            self.state.outcome = outcome

    def _publish(self, outcome: Outcome) -> None:
        if not self._is_published:
            self._is_published = True
            self._emit(c.PublishOutcome(outcome))

    # -- after every input --------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Leave Ending or Closing when no rank is active and no write is pending; leave Running at a due save point."""
        if isinstance(self.state, Running) and self.save_point.is_due(self.state.active):
            self._leave_at_save_point(self.state)
        if not self.checkpoints.is_idle:
            return
        if isinstance(self.state, Ending) and self.state.is_decided and not self.state.running.active:
            if self.pause.is_requested and self.checkpoints.store_held():  # the memory is lost with the workers
                return
            self.emit_attempt_end(self.state.running)
            self._prepare_again()
        elif isinstance(self.state, Closing) and not (self.state.running and self.state.running.active):
            if self.checkpoints.store_held():  # not before: a worker might still have written it
                return
            self.checkpoints.on_run_over()
            outcome = self.state.outcome
            self._warn_of_missing(outcome)
            self._publish(outcome)
            self.preemption.kill_preempted()
            self.state = Closed(outcome)
            self._emit(c.CloseRun())

    def _leave_at_save_point(self, running: Running) -> None:
        if self.checkpoints.is_bound_to_size and self.preemption.why is None and not self.pause.is_requested:
            self.save_point.cancel()
            self.growth.refuse()
        else:
            planned: RegroupCause = "resize" if self.save_point.why == GROWS else "pause"
            cause = "preemption" if self.preemption.why else planned
            self.regroup(running, self.preemption.why or self.save_point.why or "", cause, is_at_save_point=True)
