"""The state machine of a run: takes one input at a time, changes its state, and returns commands. Pure.

`raysgd.controller.states` has the table of states, `raysgd.controller.commands` the inputs and commands;
`raysgd.controller.run.executor` executes the commands. Timers are commands, and the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from raysgd.controller import commands as c
from raysgd.controller import frames
from raysgd.controller.checkpoints.coordinator import CheckpointCoordinator
from raysgd.controller.policies.after_failure import EXPLAIN_S, GATHER_S, Failure, FailurePolicy, find_cause
from raysgd.controller.run_plan import PreviousState, RunPlan
from raysgd.controller.state_machine.regrouping import (
    GROWS,
    SAVE_POINT_GRACE_S,
    Continuation,
    Growth,
    Pause,
    Preemption,
    RegroupCause,
    SavePoint,
)
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
    name_of,
    running_of,
)
from raysgd.session import events as e


class RunMachine:
    """One run: its state, and what leads from one state to the next.

    Args:
        uri_of: Returns the folder of a checkpoint, by its number.
        clock: Returns seconds since the epoch.

    Attributes:
        state: The state now.
        checkpoints: The run's checkpoints.
        pause: The request to pause the run, if there is one.
    """

    def __init__(self, plan: RunPlan, *, uri_of: Callable[[int], str], clock: Callable[[], float]) -> None:
        self._commands: list[c.Command] = []
        self._emit: Callable[[c.Command], None] = self._commands.append
        self._plan = plan
        self._clock = clock
        self.state: State = Preparing(attempt=1)
        self._stop_reason: str | None = None  # why the run was asked to stop
        self._failures = FailurePolicy(plan.failure, () if plan.previous is None else plan.previous.failures)
        self._save_point = SavePoint(self._emit)
        self.checkpoints = CheckpointCoordinator(
            plan, uri_of=uri_of, emit=self._emit, on_in_memory=self._save_point.on_committed
        )
        self._growth = Growth(self._save_point, clock, self._emit)
        self._preemption = Preemption(self._save_point, plan.failure.preemption_grace_s, self._emit)
        self.pause = Pause(self._save_point)
        self._continuation = Continuation(clock, self._emit)
        self._is_published = False
        self._warned_of_unsynchronized = False

    def status(self) -> dict[str, Any]:
        """Return the fields of `raysgd.result.RunStatus` that are known here."""
        running = running_of(self.state)
        return {
            "state": name_of(self.state),
            "world_size": 0 if running is None or isinstance(self.state, Closing) else len(running.nodes),
            "iteration": self.checkpoints.newest_iteration(),
            "num_failures": self._failures.num_failures,
            "checkpoint": self.checkpoints.newest_uri,
        }

    def step(self, given: c.Input) -> list[c.Command]:  # noqa: C901  (a dispatch: a line or two a case)
        """Take one input; returns the commands to execute, in order."""
        match given:
            case c.EventReceived():
                running = running_of(self.state)
                if running is not None and running.attempt == given.attempt:  # events of older attempts are refused
                    self._on_event(running, given.rank, given.event)
            case c.StreamEnded():
                self._on_stream_ended(given)
            case c.RunBegins():
                if self._plan.previous is None:
                    self._emit(c.PrepareGroup(1))
                else:
                    self._resume_after_restart(self._plan.previous)
            case c.GroupReady():
                if isinstance(self.state, Preparing):
                    self._start_attempt(self.state, given)
            case c.GroupFailed():
                self._on_group_failed(given)
            case c.JoiningWorkerReady():
                self._growth.on_worker_ready(self._undisturbed_attempt())
            case c.WorkerHung():
                self._on_worker_hung(given)
            case c.CollectivesMismatched():
                self._on_mismatch(given)
            case c.NodeDraining():
                self._on_preempted(given.attempt, given.ranks, "its node will be taken away", given.within_s)
            case c.CheckpointCommitted():
                self.checkpoints.on_committed(given.manifest, given.seconds)
                self._save_point.on_committed(given.manifest.number)
            case c.CommitFailed():
                self._on_write_failed(given.number, self.checkpoints.on_commit_failed(given.number, given.error))
            case c.MemoryCopyLost() | c.MemoryCopyStored() | c.MemoryCopyNotStored():
                self.checkpoints.on_memory_copy(given)
            case c.StopRequested():
                self._on_stop_requested(given)
            case c.PauseRequested():
                self._on_pause_requested()
            case c.ResumeRequested():
                self._on_resume_requested()
            case c.TimerFired():
                self._on_timer(given)
        return self._advance()

    def _advance(self) -> list[c.Command]:
        """Make the transitions that wait for nothing any more, and return all commands of the step.

        Running is left at a due save point; Ending and Closing, when no rank is active and no write is pending.
        """
        if isinstance(self.state, Running) and self._save_point.why and self._save_point.is_due(self.state.active):
            self._leave_at_save_point(self.state)
        state = self.state
        if (
            isinstance(state, (Ending, Closing))
            and self.checkpoints.is_idle
            and not (state.running and state.running.active)
        ):
            self._leave_state(state)
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    def _leave_state(self, state: Ending | Closing) -> None:
        """Leave a state in which no rank is active any more, unless a checkpoint must be written from memory first."""
        if isinstance(state, Ending):
            # What is in memory alone would be lost with the workers.
            if state.is_decided and not (self.pause.is_requested and self.checkpoints.store_held()):
                self._emit_attempt_end(state.running)
                self._prepare_again()
        elif not self.checkpoints.store_held():  # not before: a worker might still have written it
            self.checkpoints.on_run_over()
            self._publish(state.outcome)
            self._preemption.kill_preempted()
            self.state = Closed(state.outcome)
            self._emit(c.CloseRun())

    def _attempt_if_current(self, attempt: int) -> Running | None:
        """Return attempt number ``attempt`` if it is the current one and not over."""
        running = running_of(self.state)
        return running if running is not None and running.attempt == attempt else None

    def _undisturbed_attempt(self) -> Running | None:
        """Return the current attempt if all ranks train: none has left, and no stop was requested."""
        state = self.state
        return state if isinstance(state, Running) and state.has_all_ranks and self._stop_reason is None else None

    # -- Preparing ----------------------------------------------------------------------------------------------------

    def _resume_after_restart(self, previous: PreviousState) -> None:
        """The death of the controller's process ended all workers: a failure, unless the run had nothing more to do."""
        self._emit(c.RecordEvent("controller_restart", {"attempt": previous.attempt}))
        self.checkpoints.restore(previous)
        if previous.is_open:
            self._emit_attempt_end(previous)
        self.state = Preparing(previous.attempt + 1)
        self._is_published = previous.published is not None
        if (outcome := previous.published or previous.requested) is not None:
            self._close(outcome)
        elif previous.is_paused:
            self.state = Paused(previous.attempt + 1, 1)
        else:
            failure = Failure((), "the controller's process died, and all workers with it")
            self._retry_or_give_up(failure, previous.attempt)

    def _prepare(self, state: Preparing) -> None:
        """Request workers for the next attempt."""
        self.state = state
        self._emit(c.PrepareGroup(state.attempt, self.checkpoints.is_bound_to_size))

    def _on_group_failed(self, given: c.GroupFailed) -> None:
        if not isinstance(self.state, Preparing):
            return
        if given.can_retry:
            failure = Failure(given.ranks, given.message, is_announced=given.is_announced)
            self._retry_or_give_up(failure, self.state.attempt)
        else:
            self._close(Outcome("error", error_type=given.error_type, message=given.message))

    def _start_attempt(self, before: Preparing, group: c.GroupReady) -> None:
        """Call train_func on all ranks."""
        attempt, world_size = before.attempt, len(group.nodes)
        start, first_number = self.checkpoints.begin_attempt(attempt, world_size, group.live)
        self.state = Running(attempt, before.serial, start.iteration, group.nodes, set(range(world_size)))
        self._growth.on_group_formed(self.state, group.num_joining)
        self._save_point.request(self.state, self.pause.why)
        data: dict[str, Any] = {"attempt": attempt, "world_size": world_size, "iterations_before": start.iteration}
        data["time_before_s"] = start.time_total_s
        of_frame = data | {"workers_per_replica": self._plan.workers_per_replica}
        self._emit(c.EmitFrame(frames.ATTEMPT, attempt, data=of_frame))
        self._emit(c.RecordEvent("attempt_start", {**data, **start.place}))
        self._continuation.begin(start.live or start.copied, world_size)
        self._emit(c.StartAttempt(attempt, start, first_number))

    # -- Running: events of ranks -------------------------------------------------------------------------------------

    def _on_event(self, running: Running, rank: int, event: e.WorkerEvent) -> None:  # noqa: C901  (a dispatch)
        match event:
            case e.Reports():  # readers get them as the worker encoded them, with the checkpoints that belong to them
                data: dict[str, Any] = {"first": event.first, "count": event.count}
                closings: tuple[frames.Closing, ...] = ()
                if event.closes:
                    data["closes"] = [[index, self.checkpoints.number_of(call)] for index, call in event.closes]
                    closings = frames.closings_of(data, event.rows)
                self._emit(c.EmitFrame(frames.REPORTS, running.attempt, rank, data, event.rows))
                self.checkpoints.on_reports(rank, event.first + event.count, closings)
            case e.Saved() | e.PartSafe() | e.PartHeld() | e.HoldFailed() | e.Marked():
                self._end_if_misused(running, self.checkpoints.on_event(rank, event))
            case e.PartFailed():
                number = self.checkpoints.number_of(event.call)
                self._on_write_failed(number, self.checkpoints.on_part_failed(event))
            case e.StartUnusable():
                self._on_start_unusable(running, rank, event)
            case e.AtSavePoint():
                self._save_point.on_reached(rank, self.checkpoints.number_of(event.call), event.point)
            case e.Returned():
                self._preemption.on_returned(saw_stop=event.saw_stop)
                if isinstance(self.state, Running):
                    self._emit(c.EmitFrame(frames.RANK_DONE, running.attempt, rank))
                    self._save_point.cancel()  # otherwise this rank would repeat all that it did after the save point
                    self._end_if_misused(running, self.checkpoints.on_returned(rank))
            case e.Ended():
                if isinstance(self.state, Running):
                    self._on_stopped(running, rank)
            case e.Failed():
                self._on_failed(running, rank, event)
            case e.StopRequested():
                self._on_stop_requested(c.StopRequested(event.why, cancel=False))
            case e.Preempted():
                self._on_preempted(running.attempt, (rank,), event.why)
            case e.Sample():
                self._emit(c.RecordEvent("sample", event.values))
            case e.Warned():
                self._emit(c.RecordEvent("warning", {"rank": rank, "message": event.message}))
            case e.Unsynchronized():
                self._on_unsynchronized(running, rank, event.message)
            case e.Entered():
                running.is_entered = True  # which uses up the attempt's number
                self._continuation.on_entered(rank)
                data = {"rank": rank, "attempt": running.attempt, "timestamp": event.timestamp}
                self._emit(c.RecordEvent("entered", data | e.describe_output(event.output)))
            case e.HoldsState():
                running.holding.add(rank)
                if running.is_held:
                    self._on_grow(running)
            case e.Left():
                data = {"rank": rank, "attempt": running.attempt, **event.describe()}
                self._emit(c.RecordEvent("left", data))

    def _on_unsynchronized(self, running: Running, rank: int, message: str) -> None:
        """Warn once in a run, when all ranks train a model of their own: where some do not, others may train on purpose."""
        running.unsynchronized.add(rank)
        if not self._warned_of_unsynchronized and len(running.unsynchronized) == len(running.nodes):
            self._warned_of_unsynchronized = True
            self._emit(c.warning(message))

    def _on_stopped(self, running: Running, rank: int) -> None:
        """A rank has left train_func without returning, because the run was asked to stop. The others leave too."""
        self._emit(c.EmitFrame(frames.RANK_DONE, running.attempt, rank))
        running.stopped.add(rank)
        if len(running.stopped) == 1:  # the others may wait for it in a collective
            self._emit(c.EndAttempt(running.attempt, tuple(sorted(running.active)), "the run was asked to stop"))
            self._start_grace(running)

    def _on_failed(self, running: Running, rank: int, failed: e.Failed) -> None:
        if isinstance(self.state, Running):
            if self._stop_reason is not None and failed.in_collective:
                self._on_stopped(running, rank)
                return
            self._end_attempt(running, f"rank {rank} failed")
        if isinstance(self.state, Ending) and not self.state.is_decided:
            self.state.errors.setdefault(rank, failed)
            self.state.arrived_at.setdefault(rank, self._clock())
            if not failed.in_collective:
                self._emit(c.SetTimer("gather", running.serial, GATHER_S))

    def _on_start_unusable(self, running: Running, rank: int, event: e.StartUnusable) -> None:
        """Start again from the checkpoint before. This may come after another rank's error, which it explains."""
        state = self.state
        is_open = isinstance(state, Ending) and not state.is_decided and state.preset is None
        if (is_open or isinstance(state, Running)) and (why := self.checkpoints.skip_start(rank, event.error)):
            self._regroup(running, why, "checkpoint")

    def _end_if_misused(self, running: Running, problem: str | None) -> None:
        """End the run with an error if ``save_checkpoint`` was called against its rules."""
        if problem is not None and isinstance(self.state, Running):
            outcome = Outcome("error", error_type="CheckpointError", message=problem)
            self._end_attempt(running, "save_checkpoint was used against its rule", outcome)

    def _on_write_failed(self, number: int, message: str) -> None:
        if self._plan.checkpoint.on_write_error == "warn":
            self._save_point.on_failed(number)
            return
        outcome = Outcome("error", error_type="StorageError", message=message)
        if isinstance(self.state, Running):
            self._end_attempt(self.state, message, outcome)
        elif isinstance(self.state, Closing) and self.state.outcome.is_success:
            self.state.outcome = outcome

    # -- Running: processes -------------------------------------------------------------------------------------------

    def _on_stream_ended(self, given: c.StreamEnded) -> None:
        """A rank's last event has arrived, or its process died."""
        running = self._attempt_if_current(given.attempt)
        if running is None:
            return
        running.active.discard(given.rank)
        if given.death is not None:
            self._on_worker_death(running, given.rank, given.death)
        if running.active:
            return
        if isinstance(self.state, Ending) and not self.state.is_decided:
            self._decide_after_attempt(self.state, is_complete=True)
        elif isinstance(self.state, Running):
            self._on_all_ranks_left(running)

    def _on_all_ranks_left(self, running: Running) -> None:
        self._emit(c.LeaveGroup())
        is_stopping = self._stop_reason is not None
        if self._preemption.why and self._preemption.saw_stop and not is_stopping:
            self._regroup(running, self._preemption.why, "preemption")
            return
        self._emit_attempt_end(running, keeps_all=True)
        self._close(self._stopped_outcome() if is_stopping or running.stopped else Outcome("done"))

    def _on_worker_death(self, running: Running, rank: int, reason: str, *, is_hang: bool = False) -> None:
        """End the attempt, and count the death among its causes unless the cause is decided or the rank was killed for it."""
        if isinstance(self.state, Running):
            if self._stop_reason is not None and running.stopped:
                return  # killed because it did not leave in time
            self._end_attempt(running, f"the worker of rank {rank} {'hung' if is_hang else 'died'}")
        if isinstance(self.state, Ending) and not self.state.is_decided and rank not in self.state.killed:
            self.state.deaths.append(Death(rank, self._clock(), reason, is_hang))
            if not self._preemption.explains((rank,)):
                self._growth.on_worker_lost()
            self._emit(c.SetTimer("gather", running.serial, GATHER_S))

    def _on_worker_hung(self, given: c.WorkerHung) -> None:
        running = self._attempt_if_current(given.attempt)
        if running is None:
            return
        self._emit(c.states_event("hang", {"rank": given.rank, "kind": given.kind, "why": given.why}, given))
        if given.rank in running.active:
            self._on_worker_death(running, given.rank, given.why, is_hang=True)
            if isinstance(self.state, Ending):
                self.state.killed.add(given.rank)  # its death is not another cause
        self._emit(c.KillWorkers((given.rank,), is_lost=given.kind == "lost"))

    def _on_mismatch(self, given: c.CollectivesMismatched) -> None:
        """End the run: the program is wrong, and would wait again in the next attempt."""
        running = self._attempt_if_current(given.attempt)
        if running is None or not isinstance(self.state, Running):
            return
        self._emit(c.states_event("mismatch", {"ranks": list(given.ranks), "why": given.why}, given))
        has_stop = self._stop_reason is not None  # some ranks have left for it, in which the others wait for them
        self._end_attempt(running, given.why, self._stopped_outcome() if has_stop else given.outcome)

    def _on_preempted(self, attempt: int, ranks: Collection[int], why: str, within_s: float | None = None) -> None:
        running = self._attempt_if_current(attempt)
        if running is None or not self._preemption.add(running, ranks, why):
            return
        self._growth.on_worker_lost()
        if (undisturbed := self._undisturbed_attempt()) is not None:
            self._preemption.ask_to_leave(undisturbed, within_s)

    # -- Ending -------------------------------------------------------------------------------------------------------

    def _end_attempt(
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
        self._continuation.on_end()
        self._save_point.reset()
        self._emit(c.EndAttempt(running.attempt, tuple(sorted(running.active)), why))
        self._emit(c.SetTimer("gather", running.serial, GATHER_S))
        self._start_grace(running, at_least_s=SAVE_POINT_GRACE_S if is_at_save_point else 0.0)

    def _start_grace(self, running: Running, *, at_least_s: float = 0.0) -> None:
        """Limit the time that living ranks take to leave the attempt."""
        self._emit(c.SetTimer("grace", running.serial, max(self._plan.failure.abort_grace_s, at_least_s)))

    def _decide_after_attempt(self, ending: Ending, *, is_complete: bool) -> None:
        """Decide why the attempt ended and what follows; wait for what explains a broken collective, unless ``is_complete``."""
        cause = ending.preset or find_cause(ending, is_complete=is_complete)
        if cause is None:
            self._emit(c.SetTimer("explain", ending.running.serial, EXPLAIN_S))
            return
        if isinstance(cause, Outcome):
            self._close(cause)
        else:
            self._retry_or_give_up(cause, ending.running.attempt)
        if ending.is_grace_over:
            self._kill_active(ending.running)

    def _retry_or_give_up(self, failure: Failure, attempt: int) -> None:
        """Decide what follows a failure: another attempt, or the end of the run."""
        self._continuation.on_failure(failure)
        is_excused = self._preemption.excuses(failure, attempt)
        why_over = None if is_excused else self._count_failure(failure)
        if why_over is not None:
            outcome = failure.outcome or Outcome("error", error_type="WorkerDiedError", ranks=failure.ranks)
            message = f"{why_over}. {self.checkpoints.last_checkpoint}"
            self._close(replace(outcome, message=message, failures=self._failures.num_failures))
        elif self._stop_reason is not None:
            self._close(self._stopped_outcome())
        elif isinstance(self.state, Ending):
            self.state.is_decided = True
        else:
            self._prepare_again()

    def _count_failure(self, failure: Failure) -> str | None:
        """Count and record a failure; returns why the run must end, or None."""
        why_over = self._failures.decide(failure)
        retry = "stop" if self._stop_reason is not None else f"retry {self._failures.num_failures}"
        self._emit(c.RecordEvent("failure", failure.describe(retry if why_over is None else "give up")))
        return why_over

    def _regroup(self, running: Running, why: str, cause: RegroupCause, *, is_at_save_point: bool = False) -> None:
        """End the attempt, so that another group can form, unless the run stops. This does not count as a failure."""
        if self._stop_reason is not None:
            if isinstance(self.state, Running):
                self._end_attempt(running, why, self._stopped_outcome(), is_at_save_point=is_at_save_point)
            elif isinstance(self.state, Ending):
                self.state.preset = self._stopped_outcome()
            return
        self._emit(c.RecordEvent("regroup", {"attempt": running.attempt, "why": why, "cause": cause}))
        if isinstance(self.state, Running):
            self._end_attempt(running, why, is_at_save_point=is_at_save_point)
        assert isinstance(self.state, Ending)
        self.state.is_decided = True

    def _leave_at_save_point(self, running: Running) -> None:
        is_other = self._preemption.why or self.pause.is_requested or self._stop_reason is not None
        if self.checkpoints.is_bound_to_size and not is_other:
            self._save_point.cancel()
            self._growth.refuse()
        else:
            planned: RegroupCause = "resize" if self._save_point.why == GROWS else "pause"
            cause = "preemption" if self._preemption.why else planned
            why = self._preemption.why or self._save_point.why or ""
            self._regroup(running, why, cause, is_at_save_point=True)

    def _kill_active(self, running: Running) -> None:
        """Kill the processes of ranks that did not leave the attempt in time."""
        if not (ranks := tuple(sorted(running.active))):
            return
        if isinstance(self.state, Ending):
            self.state.killed |= running.active
        self._emit(c.warning(f"killed ranks {list(ranks)}: they did not leave their attempt in time"))
        self._emit(c.KillWorkers(ranks))

    def _prepare_again(self) -> None:
        """Prepare the next attempt, at once or after a delay. The attempt's number is reused if no rank entered train_func."""
        before = running_of(self.state) or self.state
        assert isinstance(before, (Preparing, Running))
        was_entered = isinstance(before, Running) and before.is_entered
        self._preemption.kill_preempted()
        self.state = Preparing(before.attempt + was_entered, before.serial + 1)
        if self.pause.is_requested and not self.checkpoints.has_unstored:
            self._pause_now(self.state)
        elif delay_s := self._failures.restart_delay_s(was_entered=was_entered):
            self._emit(c.SetTimer("restart", self.state.serial, delay_s))
        else:
            self._prepare(self.state)

    def _emit_attempt_end(self, last: Running | PreviousState, *, keeps_all: bool = False) -> None:
        """Announce the end of an attempt, with the rounds that are part of its checkpoints, or with all rounds."""
        keep = self.checkpoints.end_attempt(last.iterations_before)
        self._emit(c.EmitFrame(frames.ATTEMPT_END, last.attempt, data={"keep_rounds": None if keeps_all else keep}))

    # -- timers and users' requests -----------------------------------------------------------------------------------

    def _on_timer(self, given: c.TimerFired) -> None:
        state, timer = self.state, given.timer
        if isinstance(state, Preparing) and (timer, given.serial) == ("restart", state.serial):
            self._prepare(state)
            return
        running = running_of(state)
        if running is None or running.serial != given.serial:
            return
        if timer == "grow":
            self._on_grow(running)
        elif self._preemption.is_due(timer, running) and isinstance(state, Running) and self._stop_reason is None:
            self._regroup(running, self._preemption.why or "", "preemption")
        elif timer == "stop":
            self._on_stop_requested(
                c.StopRequested(f"{self._stop_reason}: the ranks did not leave in time", cancel=True)
            )
        elif timer == "save_point":
            self._save_point.on_timeout()
        elif timer == "grace":
            if isinstance(state, Ending) and not state.is_decided and state.preset is None:
                state.is_grace_over = True  # a rank that is still active may be dead, and the cause
            else:
                self._kill_active(running)
        elif timer in ("gather", "explain") and isinstance(state, Ending) and not state.is_decided:
            self._decide_after_attempt(state, is_complete=timer == "explain")

    def _on_grow(self, running: Running) -> None:
        undisturbed = self._undisturbed_attempt()
        if why := self._preemption.why or self.pause.why:
            self._save_point.request(undisturbed, why)
        elif self._growth.on_timeout(
            undisturbed,
            is_bound_to_size=self.checkpoints.is_bound_to_size,
            is_at_once=running.is_held or (self._plan.grows_without_save and not self.checkpoints.has_any),
        ):
            self._regroup(running, GROWS, "resize")

    def _on_stop_requested(self, given: c.StopRequested) -> None:
        state, outcome = self.state, given.outcome
        is_new = not (isinstance(state, (Closing, Closed)) or (isinstance(state, Ending) and state.preset is not None))
        if given.cancel and is_new:
            self._emit(c.RecordEvent("cancel", {"why": given.why}))  # a restarted controller reads it
        if isinstance(state, (Preparing, Paused)):
            self._close(outcome)
        elif isinstance(state, Running) and given.cancel:
            self._end_attempt(state, given.why, outcome)
        elif isinstance(state, Running):
            self._ask_to_stop(state, given)
        elif isinstance(state, Ending) and state.is_decided:
            self._close(outcome)  # instead of the next attempt
        elif isinstance(state, Ending) and state.preset is None:
            if given.cancel:
                state.preset = outcome  # an error that is about to arrive no longer matters
            elif self._stop_reason is None:
                self._record_stop(given.why)  # no further attempt; an exception on its way is still raised

    def _ask_to_stop(self, running: Running, given: c.StopRequested) -> None:
        """Ask all ranks to leave; with a grace they may save first, if the run saves at all."""
        if given.grace_s is not None:
            self._emit(c.SetTimer("stop", running.serial, given.grace_s))
        if self._stop_reason is not None:
            return
        may_save = given.grace_s is not None and (self.checkpoints.has_any or self._plan.start.is_checkpoint)
        if may_save:
            self._save_point.request(self._undisturbed_attempt(), given.why)
        else:
            self._save_point.cancel()
        self._record_stop(given.why)
        self._emit(c.RequestStop(running.attempt, ends_reports=not may_save))

    def _record_stop(self, why: str) -> None:
        self._stop_reason = why
        self._emit(c.RecordEvent("stop", {"why": why}))

    def _stopped_outcome(self) -> Outcome:
        return Outcome("stopped", message=self._stop_reason or "")

    def _on_pause_requested(self) -> None:
        if isinstance(self.state, Preparing) and not self.checkpoints.has_unstored:
            self._pause_now(self.state)
        elif isinstance(self.state, Preparing):  # a checkpoint in memory alone is written once the workers are ready
            self.pause.request(None)
        elif isinstance(self.state, (Running, Ending)):  # if the attempt cannot be left, the run ends with it
            self.pause.request(self._undisturbed_attempt())

    def _pause_now(self, before: Preparing) -> None:
        """Release the workers until the run is resumed."""
        self.pause.is_requested = False
        self.state = Paused(before.attempt, before.serial)
        self._emit(c.ReleaseWorkers())
        self._emit(c.RecordEvent("paused", {"attempt": before.attempt}))

    def _on_resume_requested(self) -> None:
        self.pause.withdraw(self._undisturbed_attempt())
        if isinstance(self.state, Paused):
            self._emit(c.RecordEvent("resumed", {"attempt": self.state.attempt}))
            self._prepare(Preparing(self.state.attempt, self.state.serial + 1))

    # -- Closing ------------------------------------------------------------------------------------------------------

    def _close(self, outcome: Outcome) -> None:
        """End the run with this outcome. Ranks may still have to leave the current attempt."""
        if isinstance(self.state, Ending):
            self._emit_attempt_end(self.state.running)
            # Ranks that leave from a save point had more time than a user who ends the run waits.
            if self.state.is_decided:
                self._start_grace(self.state.running)
        self.state = Closing(outcome, running_of(self.state))
        if outcome.kind == "error":  # the user gets it at once; cleaning up follows
            self._publish(outcome)

    def _publish(self, outcome: Outcome) -> None:
        if not self._is_published:
            self._is_published = True
            self._emit(c.PublishOutcome(outcome))
