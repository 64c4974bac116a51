"""The state machine of a run: takes one input at a time and returns commands. Pure.

`RunMachine` only finds the transition that an input leads to. The state is changed in `raysgd.controller.machine.lifecycle`.
`raysgd.controller.states` has the table of states, `raysgd.controller.commands` the inputs and commands;
`raysgd.controller.run.executor` executes the commands. Timers are commands, and the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from raysgd.controller import commands as c
from raysgd.controller.machine.lifecycle import RunLifecycle
from raysgd.controller.machine.regrouping import GROWS
from raysgd.controller.policies.failure import Failure
from raysgd.controller.run_plan import RunPlan
from raysgd.controller.states import (
    CALLBACK_NODE,
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
from raysgd.session import events as e

#: What to do about a mismatch.
_SAME_COLLECTIVES = (
    "Make the same number of steps on every rank, as with raysgd.torch.prepare_data_loader or get_dataset(), and call "
    "collectives on all ranks in the same order, with the same sizes and dtypes"
)


class RunMachine:
    """One run. Finds the transition of `RunLifecycle` that an input leads to.

    Args:
        uri_of: Returns the folder of a checkpoint, by its number.
        clock: Returns seconds since the epoch.
    """

    def __init__(self, plan: RunPlan, *, uri_of: Callable[[int], str], clock: Callable[[], float]) -> None:
        self._commands: list[c.Command] = []
        self._lifecycle = RunLifecycle(plan, uri_of=uri_of, clock=clock, emit=self._emit)
        self.checkpoints = self._lifecycle.checkpoints
        self._save_point = self._lifecycle.save_point
        self._growth = self._lifecycle.growth
        self._preemption = self._lifecycle.preemption
        self._pause = self._lifecycle.pause
        self._grows_without_save = plan.grows_without_save
        self._ignores_write_errors = plan.checkpoint.on_write_error == "warn"

    @property
    def state(self) -> State:
        return self._lifecycle.state

    @property
    def is_pause_requested(self) -> bool:
        """Whether a pause was requested that is still to begin."""
        return self._pause.is_requested

    def status(self) -> dict[str, Any]:
        """Return the fields of `raysgd.result.RunStatus` that are known here."""
        running = running_of(self.state)
        return {
            "state": name_of(self.state),
            "world_size": 0 if running is None or isinstance(self.state, Closing) else len(running.nodes),
            "iteration": self.checkpoints.newest_iteration(),
            "num_failures": self._lifecycle.failures.num_failures,
            "checkpoint": self.checkpoints.newest_uri,
        }

    def begin(self) -> list[c.Command]:
        """Return the first commands."""
        self._lifecycle.begin()
        return self._advance()

    def accepts(self, attempt: int) -> bool:
        """Return whether events of the attempt count: it is the current one, and it is not over."""
        return self._lifecycle.attempt_if_current(attempt) is not None

    def step(self, given: c.Input) -> list[c.Command]:  # noqa: C901  (a dispatch: one line a case)
        """Take one input; returns the commands to execute, in order."""
        match given:
            case c.EventReceived():
                self._on_event(given)
            case c.ReportsReceived():
                if self.accepts(given.attempt):
                    self.checkpoints.on_reports(given.rank, given.num_reports, given.closings)
            case c.MetricsMissing():
                self._lifecycle.on_metrics_missing(given)
            case c.StreamEnded():
                self._on_stream_ended(given)
            case c.GroupReady():
                if isinstance(self.state, Preparing):
                    self._lifecycle.start_attempt(given.nodes, given.num_joining)
            case c.GroupFailed():
                self._on_group_failed(given)
            case c.JoiningWorkerReady():
                self._growth.on_worker_ready(self._lifecycle.undisturbed_attempt())
            case c.WorkerHung():
                self._on_worker_hung(given)
            case c.CollectivesMismatched():
                self._on_mismatch(given)
            case c.NodeDraining():
                self._on_preempted(given.attempt, given.ranks, "its node will be taken away", given.within_s)
            case c.CheckpointCommitted():
                self.checkpoints.on_committed(given.manifest)
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
                self._pause.withdraw(self._lifecycle.undisturbed_attempt())
                self._lifecycle.resume()
            case c.TimerFired():
                self._on_timer(given)
        return self._advance()

    # -- workers ------------------------------------------------------------------------------------------------------

    def _on_group_failed(self, given: c.GroupFailed) -> None:
        if not isinstance(self.state, Preparing):
            return
        if given.can_retry:
            failure = Failure(given.ranks, given.message, is_announced=given.is_announced)
            self._lifecycle.retry_or_give_up(failure, self.state.attempt)
        else:
            self._lifecycle.close(Outcome("error", error_type=given.error_type, message=given.message))

    def _on_event(self, given: c.EventReceived) -> None:  # noqa: C901  (a dispatch: one line a case)
        running, rank, event = self._lifecycle.attempt_if_current(given.attempt), given.rank, given.event
        if running is None:
            return  # events of older attempts are refused
        match event:
            case e.Saved() | e.PartSafe() | e.PartHeld() | e.HoldFailed():
                self._end_if_misused(running, self.checkpoints.on_event(rank, event))
            case e.PartFailed():
                number = self.checkpoints.number_of(event.call)
                self._on_write_failed(number, self.checkpoints.on_part_failed(event))
            case e.StartUnusable():
                self._on_start_unusable(running, event)
            case e.AtSavePoint():
                self._save_point.on_reached(rank, self.checkpoints.number_of(event.call), event.point)
            case e.Returned():
                self._preemption.on_returned(saw_stop=event.saw_stop)
                if isinstance(self.state, Running):
                    self._lifecycle.on_returned(running, rank)
                    self._end_if_misused(running, self.checkpoints.on_returned(rank))
            case e.Ended():
                if isinstance(self.state, Running):
                    self._lifecycle.on_stopped(running, rank)
            case e.Failed():
                self._on_failed(running, rank, event)
            case e.StopRequested():
                self._on_stop_requested(c.StopRequested(event.why, cancel=False))
            case e.Preempted():
                self._on_preempted(given.attempt, (rank,), event.why)
            case e.Sample():
                self._emit(c.RecordEvent("sample", event.values))
            case e.Warned():
                self._emit(c.RecordEvent("warning", {"rank": rank, "message": event.message}))
            case e.Unsynchronized():
                self._lifecycle.on_unsynchronized(running, rank, event.message)
            case e.Entered():
                self._lifecycle.on_entered(running)
                data = {"rank": rank, "attempt": running.attempt, "timestamp": event.timestamp}
                self._emit(c.RecordEvent("entered", data | _describe_output(event.output)))
            case e.Left():
                data = {"rank": rank, "attempt": running.attempt}
                self._emit(c.RecordEvent("left", data | _describe_output(event.output)))

    def _on_failed(self, running: Running, rank: int, failed: e.Failed) -> None:
        if self._lifecycle.is_stopping and failed.in_collective and isinstance(self.state, Running):
            self._lifecycle.on_stopped(running, rank)
            return
        if isinstance(self.state, Running):
            self._lifecycle.end_attempt(running, f"rank {rank} failed")
        self._lifecycle.add_error(rank, failed)

    def _on_start_unusable(self, running: Running, event: e.StartUnusable) -> None:
        """Start again from the checkpoint before. This may come after another rank's error, which it explains."""
        state = self.state
        is_open = isinstance(state, Ending) and not state.is_decided and state.preset is None
        if (is_open or isinstance(state, Running)) and (why := self.checkpoints.skip_start(event.error)):
            self._lifecycle.regroup(running, why, "checkpoint")

    def _on_stream_ended(self, given: c.StreamEnded) -> None:
        running = self._lifecycle.attempt_if_current(given.attempt)
        if running is None:
            return
        self._lifecycle.on_stream_ended(running, given.rank)
        if given.death is not None:
            self._on_death(running, given.rank, given.death)
        if running.active:
            return
        if isinstance(self.state, Ending) and not self.state.is_decided:
            self._lifecycle.decide_after_attempt(is_complete=True)
        elif isinstance(self.state, Running):
            self._on_all_ranks_left(running)

    def _on_all_ranks_left(self, running: Running) -> None:
        self._emit(c.LeaveGroup())
        is_stopping = self._lifecycle.is_stopping
        if self._preemption.why and self._preemption.saw_stop and not is_stopping:
            self._lifecycle.regroup(running, self._preemption.why, "preemption")
            return
        self._lifecycle.emit_attempt_end(running, keeps_all=True)
        is_stopped = is_stopping or running.stopped
        self._lifecycle.close(self._lifecycle.stopped_outcome() if is_stopped else Outcome("done"))

    def _on_worker_hung(self, given: c.WorkerHung) -> None:
        running = self._lifecycle.attempt_if_current(given.attempt)
        if running is None:
            return
        self._emit(_states_event("hang", {"rank": given.rank, "kind": given.kind, "why": given.why}, given))
        if given.rank in running.active:
            self._on_death(running, given.rank, given.why, is_hang=True)
            self._lifecycle.ignore_death(given.rank)
        self._emit(c.KillWorkers((given.rank,), is_lost=given.kind == "lost"))

    def _on_mismatch(self, given: c.CollectivesMismatched) -> None:
        """End the run: the program is wrong, and would wait again in the next attempt."""
        running = self._lifecycle.attempt_if_current(given.attempt)
        if running is None or not isinstance(self.state, Running):
            return
        self._emit(_states_event("mismatch", {"ranks": list(given.ranks), "why": given.why}, given))
        if self._lifecycle.is_stopping:  # some ranks have left for the stop, in which the others wait for them
            self._lifecycle.end_attempt(running, given.why, self._lifecycle.stopped_outcome())
            return
        message = f"the ranks do not make the same collectives: {given.why}. {_SAME_COLLECTIVES}"
        outcome = Outcome("error", error_type="CollectiveMismatchError", message=message, ranks=given.ranks)
        self._lifecycle.end_attempt(running, given.why, outcome)

    def _on_death(self, running: Running, rank: int, reason: str, *, is_hang: bool = False) -> None:
        if isinstance(self.state, Running):
            if self._lifecycle.is_stopping and running.stopped:
                return  # killed because it did not leave in time
            self._lifecycle.end_attempt(running, f"the worker of rank {rank} {'hung' if is_hang else 'died'}")
        self._lifecycle.add_death(rank, reason, is_hang=is_hang)

    def _on_preempted(self, attempt: int, ranks: Collection[int], why: str, within_s: float | None = None) -> None:
        running = self._lifecycle.attempt_if_current(attempt)
        if running is None or not self._preemption.add(running, ranks, why):
            return
        self._growth.on_worker_lost()
        if (undisturbed := self._lifecycle.undisturbed_attempt()) is not None:
            self._preemption.ask_to_leave(undisturbed, within_s)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _end_if_misused(self, running: Running, problem: str | None) -> None:
        """End the run with an error if ``save_checkpoint`` was called against its rules."""
        if problem is not None and isinstance(self.state, Running):
            outcome = Outcome("error", error_type="CheckpointError", message=problem)
            self._lifecycle.end_attempt(running, "save_checkpoint was used against its rule", outcome)

    def _on_write_failed(self, number: int, message: str) -> None:
        if self._ignores_write_errors:
            self._save_point.on_failed(number)
            return
        outcome = Outcome("error", error_type="StorageError", message=message)
        if isinstance(self.state, Running):
            self._lifecycle.end_attempt(self.state, message, outcome)
        else:
            self._lifecycle.fail_success(outcome)

    # -- timers and users' requests -----------------------------------------------------------------------------------

    def _on_timer(self, given: c.TimerFired) -> None:
        state, timer = self.state, given.timer
        if isinstance(state, Preparing) and (timer, given.serial) == ("restart", state.serial):
            self._lifecycle.prepare()
            return
        running = running_of(state)
        if running is None or running.serial != given.serial:
            return
        is_undecided = isinstance(state, Ending) and not state.is_decided
        if timer == "grow":
            self._on_grow(running)
        elif timer == "preemption" and isinstance(state, Running) and not self._lifecycle.is_stopping:
            self._lifecycle.regroup(running, self._preemption.why or "", "preemption")
        elif timer == "save_point":
            self._save_point.on_timeout()
        elif timer == "grace":
            self._lifecycle.on_grace_over(running)
        elif timer in ("gather", "explain") and is_undecided:
            self._lifecycle.decide_after_attempt(is_complete=timer == "explain")

    def _on_grow(self, running: Running) -> None:
        undisturbed = self._lifecycle.undisturbed_attempt()
        if why := self._preemption.why or self._pause.why:
            self._save_point.request(undisturbed, why)
        elif self._growth.on_timeout(
            undisturbed,
            is_bound_to_size=self.checkpoints.is_bound_to_size,
            is_at_once=self._grows_without_save and not self.checkpoints.has_any,
        ):
            self._lifecycle.regroup(running, GROWS, "resize")

    def _on_stop_requested(self, given: c.StopRequested) -> None:
        state = self.state
        outcome = _outcome_of_stop(given)
        is_new = not (isinstance(state, (Closing, Closed)) or (isinstance(state, Ending) and state.preset is not None))
        if given.cancel and is_new:
            self._emit(c.RecordEvent("cancel", {"why": given.why}))  # a restarted controller reads it
        if isinstance(state, (Preparing, Paused)):
            self._lifecycle.close(outcome)
        elif isinstance(state, Running) and given.cancel:
            self._lifecycle.end_attempt(state, given.why, outcome)
        elif isinstance(state, Running) and not self._lifecycle.is_stopping:
            self._save_point.cancel()
            self._lifecycle.record_stop(given.why)
            self._emit(c.RequestStop(state.attempt))
        elif isinstance(state, Ending) and state.is_decided:
            self._lifecycle.close(outcome)  # instead of the next attempt
        elif isinstance(state, Ending) and state.preset is None:
            if given.cancel:
                self._lifecycle.preset_outcome(outcome)  # an error that is about to arrive no longer matters
            elif not self._lifecycle.is_stopping:
                self._lifecycle.record_stop(given.why)  # no further attempt; an exception on its way is still raised

    def _on_pause_requested(self) -> None:
        if isinstance(self.state, Preparing) and not self.checkpoints.has_unstored:
            self._lifecycle.pause_now(self.state)
        elif isinstance(self.state, Preparing):  # a checkpoint in memory alone is written once the workers are ready
            self._pause.request(None)
        elif isinstance(self.state, (Running, Ending)):  # if the attempt cannot be left, the run ends with it
            self._pause.request(self._lifecycle.undisturbed_attempt())

    # -- commands -----------------------------------------------------------------------------------------------------

    def _emit(self, command: c.Command) -> None:
        self._commands.append(command)

    def _advance(self) -> list[c.Command]:
        self._lifecycle.advance()
        commands, self._commands = self._commands, []
        return commands


def _states_event(kind: str, data: dict[str, Any], given: c.WorkerHung | c.CollectivesMismatched) -> c.RecordEvent:
    """Return an event with the stacks of all ranks and their last collectives."""
    data["stacks"] = {str(rank): stack for rank, stack in given.stacks.items()}
    collectives = {str(rank): [one.to_json() for one in last] for rank, last in given.collectives.items() if last}
    return c.RecordEvent(kind, {**data, "collectives": collectives} if collectives else data)


def _outcome_of_stop(given: c.StopRequested) -> Outcome:
    if given.failed is not None:
        return Outcome("error", failed=given.failed, node=CALLBACK_NODE)
    return Outcome("cancelled" if given.cancel else "stopped", message=given.why)


def _describe_output(files: tuple[e.OutputFile, ...]) -> dict[str, Any]:
    """Return what an event says of the files that a process prints to."""
    return {"output": [[file.path, file.size] for file in files]} if files else {}
