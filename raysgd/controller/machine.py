"""A run as a state machine: one input at a time in, commands out. Pure; `raysgd.controller.run` acts on the commands.

The states and their edges stand in `raysgd.controller.states`. Timers are commands, and the clock is given.
"""

from __future__ import annotations

from collections.abc import Collection

from raysgd.controller import commands as c
from raysgd.controller import frames, notes
from raysgd.controller.moves import GATHER_S, Moves
from raysgd.controller.states import Closed, Closing, Death, Ending, Outcome, Paused, Preparing, Running, running_of
from raysgd.session import events as e


class RunMachine(Moves):
    """One run."""

    def begin(self) -> list[c.Command]:
        """The first commands."""
        self._begin()
        self._move_on()
        return self._take()

    def step(self, given: c.Input) -> list[c.Command]:  # noqa: C901  (a dispatch: one line a case)
        """Take one input; returns what is to be done, in order."""
        match given:
            case c.WorkerSaid():
                self._worker_said(given)
            case c.WorkerGone():
                self._worker_gone(given)
            case c.GroupReady():
                self._group_ready(given)
            case c.GroupFailed():
                self._group_failed(given)
            case c.NewcomerUp():
                self._growth.came(self._running_alone())
            case c.WorkerHung():
                self._worker_hung(given)
            case c.NodeDrains():
                self._preempted(given.attempt, given.ranks, "its node will be taken away", given.within_s)
            case c.Committed():
                self.desk.committed(given.manifest)
                self._savepoint.committed(given.manifest.number)
            case c.CommitFailed():
                self._write_failed(given.number, self.desk.failed(given.number, given.error))
            case c.HeldLost() | c.HeldStored() | c.HeldNotStored():
                self.desk.take_held(given)
            case c.StopAsked():
                self._stop_asked(given)
            case c.PauseAsked():
                self._pause_asked()
            case c.ResumeAsked():
                self._pausing.take_back(self._running_alone())
                if isinstance(self.state, Paused):
                    self._wake_up(self.state)
            case c.TimeUp():
                self._time_up(given)
        self._move_on()
        return self._take()

    # -- preparing ------------------------------------------------------------------------------------------------

    def _group_ready(self, given: c.GroupReady) -> None:
        if not isinstance(self.state, Preparing):
            return
        attempt, world_size = self.state.attempt, len(given.nodes)
        self._nodes = given.nodes
        reached, self._is_ahead = self._reached if given.num_parked else None, False
        start, first_number = self.desk.begin_attempt(attempt, world_size, reached)
        self.state = Running(attempt, self.state.serial, start.iteration, set(range(world_size)), world_size)
        self.state.time_before_s, self.state.begun_s = start.time_total_s, self._clock()
        self._growth.formed(self.state, given.num_newcomers)
        self._pausing.agrees_again(self.state)
        self._commands += notes.attempt_begins(attempt, world_size, start, first_number)

    def _group_failed(self, given: c.GroupFailed) -> None:
        if not isinstance(self.state, Preparing):
            return
        if given.can_retry:
            self._retry_or_give_up(notes.failure_of(given), self.state.attempt)
        else:
            self._close(Outcome("error", error_type=given.error_type, message=given.message))

    # -- what workers say -----------------------------------------------------------------------------------------

    def _worker_said(self, given: c.WorkerSaid) -> None:  # noqa: C901  (a dispatch: one line a case)
        running, rank, said = self._running(given.attempt), given.rank, given.event
        if running is None:
            return  # of an older attempt: refused
        match said:
            case e.Reports():
                self.desk.reported(rank, said.first + said.count)
                self._out(notes.reports(running, rank, said))
            case e.Saved() | e.PartSafe() | e.PartHeld() | e.HoldFailed() | e.Scored():
                self._break_rule(running, self.desk.take(rank, said))
            case e.PartFailed():
                self._write_failed(self.desk.number_of(said.call), self.desk.part_failed(said))
            case e.StartUnusable():  # it may come after the error of another rank, and explains it
                is_open = isinstance(self.state, Ending) and not self.state.is_settled and self.state.preset is None
                if (is_open or isinstance(self.state, Running)) and (why := self.desk.pass_over(said.error)):
                    self._regroup(running, why)
            case e.AtSavePoint():
                self._savepoint.reached(rank, self.desk.number_of(said.call))
            case e.Returned():
                self._preemption.saw_stop |= said.saw_stop
                self._left(running, rank, is_returned=True)
            case e.Ended():
                self._left(running, rank, is_returned=False)
            case e.Failed():
                self._failed(running, rank, said)
            case e.Parked():
                self._has_parked(running, rank, said)
            case e.StopWanted():
                self._stop_asked(c.StopAsked(said.why, cancel=False))
            case e.Preempted():
                self._preempted(given.attempt, (rank,), said.why)
            case e.Sample() | e.Warned():
                self._out(notes.said(rank, said))
            case e.Entered():
                running.is_entered = True
                self._out(notes.entered(running, rank, said))

    def _left(self, running: Running, rank: int, *, is_returned: bool) -> None:
        if not isinstance(self.state, Running):
            return
        self._out(c.Say(frames.RANK_DONE, running.attempt, rank))
        if is_returned:
            self._savepoint.call_off()  # it is too late: what this rank has done would be done again
            self._break_rule(running, self.desk.left(rank))
            return
        running.ended.add(rank)
        if len(running.ended) == 1:  # the others may wait for it in a collective
            self._out(c.EndRanks(running.attempt, tuple(sorted(running.inside)), "the run was asked to stop"))
            self._out(c.SetTimer("grace", running.serial, self._plan.failure.abort_grace_s))

    def _failed(self, running: Running, rank: int, failed: e.Failed) -> None:
        if self._is_stopping and failed.in_collective and isinstance(self.state, Running):
            self._left(running, rank, is_returned=False)
            return
        if isinstance(self.state, Running):
            self._end_attempt(running, f"rank {rank} failed")
        if isinstance(self.state, Ending) and not self.state.is_settled:
            self.state.failures.setdefault(rank, failed)
            self.state.arrived.setdefault(rank, self._clock())
            if not failed.in_collective:
                self._out(c.SetTimer("gather", running.serial, GATHER_S))

    def _has_parked(self, running: Running, rank: int, parked: e.Parked) -> None:
        running.parked[rank] = parked.iteration
        if (
            isinstance(self.state, Running)
            and not self._is_stopping
            and not parked.is_broken
            and self._savepoint.is_inside
            and self._savepoint.why
        ):
            self._regroup(running, self._preemption.why or self._savepoint.why)
        else:
            self._failed(running, rank, parked.failed or notes.group_broke(rank, self._clock()))

    def _worker_gone(self, given: c.WorkerGone) -> None:
        running = self._running(given.attempt)
        if running is None:
            return
        running.inside.discard(given.rank)
        if given.died is not None:
            self._died(running, given.rank, given.died)
        if isinstance(self.state, Ending) and not running.inside and not self.state.is_settled:
            self._settle(is_complete=True)  # all streams have ended: nothing more is to come
        elif isinstance(self.state, Running) and not running.inside:
            self._out(c.LeaveGroup(running.attempt))
            if self._preemption.why and self._preemption.saw_stop and not self._is_stopping:
                self._regroup(running, self._preemption.why)
                return
            self._out(c.Say(frames.ATTEMPT_END, running.attempt, data={"keep_rounds": None}))
            self.state = Closing(self._stopped() if self._is_stopping or running.ended else Outcome("done"), running)

    def _worker_hung(self, given: c.WorkerHung) -> None:
        running = self._running(given.attempt)
        if running is None:
            return
        self._out(notes.hang(given))
        if given.rank in running.inside:
            self._died(running, given.rank, given.why, is_hang=True)
            if isinstance(self.state, Ending):
                self.state.killed.add(given.rank)
        self._out(c.KillRanks((given.rank,), is_lost=given.kind == "lost"))

    def _died(self, running: Running, rank: int, reason: str, *, is_hang: bool = False) -> None:
        if self._is_stopping and isinstance(self.state, Running) and running.ended:
            return  # it was killed for not leaving in time
        if isinstance(self.state, Running):
            self._end_attempt(running, f"the worker of rank {rank} {'hung' if is_hang else 'died'}")
        if isinstance(self.state, Ending) and not self.state.is_settled and rank not in self.state.killed:
            self.state.deaths.append(Death(rank, self._clock(), reason, is_hang))
            if not self._preemption.explains((rank,)):
                self._growth.lost()
            self._out(c.SetTimer("gather", running.serial, GATHER_S))

    def _break_rule(self, running: Running, rule: str | None) -> None:
        if rule is not None and isinstance(self.state, Running):
            outcome = Outcome("error", error_type="CheckpointError", message=rule)
            self._end_attempt(running, "save_checkpoint was used against its rule", outcome)

    def _write_failed(self, number: int, message: str) -> None:
        if self._plan.checkpoint.on_write_error == "warn":
            self._savepoint.failed(number)
            return
        outcome = Outcome("error", error_type="StorageError", message=message)
        if isinstance(self.state, Running):
            self._end_attempt(self.state, message, outcome)
        elif isinstance(self.state, Closing) and self.state.outcome.kind in ("done", "stopped"):
            self.state.outcome = outcome

    def _preempted(self, attempt: int, ranks: Collection[int], why: str, within_s: float | None = None) -> None:
        running = self._running(attempt)
        if running is None or not self._preemption.note(running, ranks, self._nodes, why):
            return
        self._growth.lost()
        if (alone := self._running_alone()) is not None:
            self._preemption.ask(alone, within_s)

    # -- time, and what users ask ---------------------------------------------------------------------------------

    def _time_up(self, given: c.TimeUp) -> None:
        if isinstance(self.state, Preparing) and given == c.TimeUp("pause", self.state.serial):
            self._prepare()
            return
        running = running_of(self.state)
        if running is None or running.serial != given.serial:
            return
        if given.timer == "grow" and not self._must_leave(self._running_alone()):
            self._growth.time_up(self._running_alone(), self.desk.is_bound_to_size)
        elif given.timer == "preemption" and isinstance(self.state, Running) and not self._is_stopping:
            self._regroup(running, self._preemption.why or "")
        elif given.timer == "savepoint":
            self._savepoint.reaching_took_too_long()
        elif given.timer == "grace":
            if isinstance(self.state, Ending) and not self.state.is_settled and self.state.preset is None:
                self.state.is_grace_over = True  # who has not left may be dead, and the reason
            else:
                self._kill_the_slow(running)
        elif given.timer in ("gather", "explain") and isinstance(self.state, Ending) and not self.state.is_settled:
            self._settle(is_complete=given.timer == "explain")

    def _stop_asked(self, given: c.StopAsked) -> None:
        outcome = notes.outcome_of_stop(given)
        is_news = not isinstance(self.state, Ending) or self.state.preset is None
        if given.cancel and is_news and not isinstance(self.state, (Closing, Closed)):
            self._out(c.Note("cancel", {"why": given.why}))  # for a controller that is started again
        if isinstance(self.state, (Preparing, Paused)):
            self._close(outcome)
        elif isinstance(self.state, Running) and given.cancel:
            self._end_attempt(self.state, given.why, outcome)
        elif isinstance(self.state, Running) and not self._is_stopping:
            self._is_stopping, self._why_stopped = True, given.why
            self._savepoint.call_off()
            self._out(c.Note("stop", {"why": given.why}))
            self._out(c.AskToStop(self.state.attempt))
        elif isinstance(self.state, Ending) and self.state.is_settled:  # on its way to a retry
            self._say_attempt_end(self.state.running)
            self._close(outcome, self.state.running, self.state.killed)
        elif isinstance(self.state, Ending) and self.state.preset is None:
            if given.cancel:
                self.state.preset = outcome  # an error that is on its way no longer matters
            elif not self._is_stopping:
                # No further attempt; an exception that is on its way is still raised.
                self._is_stopping, self._why_stopped = True, given.why
                self._out(c.Note("stop", {"why": given.why}))

    def _pause_asked(self) -> None:
        if isinstance(self.state, Preparing) and self._can_rest:
            self._rest(self.state)
        elif isinstance(self.state, Preparing):  # what is in memory alone is written once the workers are there
            self._pausing.is_wanted = True
        elif isinstance(self.state, (Running, Ending)):  # of an attempt that cannot be left the run will be over
            self._pausing.ask(self._running_alone())

    def _must_leave(self, running: Running | None) -> bool:
        """Whether the ranks are to leave whatever the group's size; then they agree on a save for it, if they have not."""
        return self._preemption.agrees_again(running) or self._pausing.agrees_again(running)
