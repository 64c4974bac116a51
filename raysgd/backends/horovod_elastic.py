"""What `hvd.elastic.run` finds in a worker in place of Horovod's own driver: raysgd's next groups, or a refusal.

Two names of Horovod's are given another value: what its functions register with, to hear of hosts, and what they call to
initialise Horovod anew. See doc/design/0023-inside-train-func.md.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from raysgd.errors import ConfigError
from raysgd.session import context


class Notices:
    """Stands for Horovod's `WorkerNotificationManager`: knows the states of functions that run now.

    Args:
        broadcast: Gives all ranks the object of rank 0.
    """

    def __init__(self, broadcast: Callable[[Any], Any]) -> None:
        self._broadcast = broadcast
        self._states: dict[Any, StateData] = {}
        self._is_between = False

    @property
    def is_heard(self) -> bool:
        """Whether a function runs that gets over a broken group."""
        return bool(self._states)

    @property
    def iteration(self) -> int | None:
        """Rounds of the run after which the state stands that a function goes on from."""
        return min((state.iteration for state in self._states.values()), default=None)

    def hosts_changed(self) -> bool:
        """Have all ranks leave their group at the next commit, as rank 0 tells them there; False if nobody can hear it now."""
        if self._is_between:  # Horovod empties the queue when a group has formed
            return False
        from horovod.runner.elastic.worker import HostUpdateResult

        for state in list(self._states):
            state.on_hosts_updated(time.time_ns(), HostUpdateResult.added)
        return self.is_heard

    def rejoin(self, rejoin: Callable[[int | None, bool], None]) -> None:
        """A function leaves its group for another one."""
        self._is_between = True
        is_changed = any(state.is_changed for state in self._states.values())
        rejoin(self.iteration, not is_changed)

    def has_rejoined(self) -> None:
        """It goes on in that."""
        self._is_between = False

    # -- what Horovod calls -----------------------------------------------------------------------------------

    def init(self) -> None:
        """Where Horovod's own opens a server that its driver calls."""
        return

    def register_listener(self, state: Any) -> None:
        """A function begins that has this state."""
        self._states[state] = StateData(state, self._broadcast, self.has_rejoined)

    def remove_listener(self, state: Any) -> None:
        """It has ended."""
        self._is_between = False
        self._states.pop(state).let_go()


class StateData:
    """The place in raysgd's datasets, and in its rounds, as a part of a state: committed with it, and shared where it is.

    All ranks commit or none, when what they had reported is on its way, so that rounds that the state has left behind are whole.

    Attributes:
        iteration: Rounds of the run at the last commit.
        is_changed: The function has been told that the members change, and leaves its group.
    """

    def __init__(self, state: Any, broadcast: Callable[[Any], Any], on_reset: Callable[[], None]) -> None:
        self._state = state
        self._broadcast = broadcast
        self.iteration, self._positions = _place()
        self._told_of_reset = on_reset
        self.is_changed = False
        self._save, self._sync, self._look, self._reset = (
            state.save,
            state.sync,
            state.check_host_updates,
            state.on_reset,
        )
        state.save, state.sync, state.commit = self._save_too, self._sync_too, self._commit_too
        state.check_host_updates, state.on_reset = self._look_too, self._reset_too

    def let_go(self) -> None:
        """The state is as it was."""
        for name in ("save", "sync", "commit", "check_host_updates", "on_reset"):
            delattr(self._state, name)

    def _look_too(self) -> None:
        from horovod.common.exceptions import HostsUpdatedInterrupt

        try:
            self._look()
        except HostsUpdatedInterrupt:
            self.is_changed = True
            raise

    def _reset_too(self) -> None:
        self._reset()
        self.is_changed = False
        self._told_of_reset()

    def _commit_too(self) -> None:
        """What Horovod's own does in the other order: its look for hosts is a collective, so all ranks are here after it."""
        from horovod.common.exceptions import HostsUpdatedInterrupt

        context.current().hand_on()
        changed: HostsUpdatedInterrupt | None = None
        try:
            self._state.check_host_updates()
        except HostsUpdatedInterrupt as update:
            changed = update
        self._state.save()
        if changed is not None:
            raise changed

    def _save_too(self) -> None:
        self._save()
        self.iteration, self._positions = _place()

    def _sync_too(self) -> None:
        self._sync()
        self.iteration, self._positions = self._broadcast((self.iteration, self._positions))
        if self._positions:
            context.current().go_on_in_data(self._positions)


class Refusal:
    """Stands there where raysgd enters train_func again: of two that recover each would undo what the other does.

    And Horovod's driver, which would tell it of other members, is not there.
    """

    def init(self) -> None:
        """A function under ``hvd.elastic.run`` is called.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "hvd.elastic.run recovers within train_func, and with HorovodConfig(elastic='raysgd') it is raysgd that recovers, "
            "by entering train_func again. Give Trainer(backend_args={'elastic': 'horovod'}), or leave out hvd.elastic.run "
            "and go on from raysgd.load_checkpoint()."
        )


def _place() -> tuple[int, dict[str, Any]]:
    """Rounds of the run so far, and where training stands in its datasets."""
    session = context.current()
    return session.iteration, session.data_positions()


def refuse() -> None:
    """Have `hvd.elastic.run` refuse to run anything."""
    common: Any = importlib.import_module("horovod.common.elastic")
    common.notification_manager = Refusal()


def install(framework: str, rejoin: Callable[[int | None, bool], None]) -> Notices:
    """Have `hvd.elastic.run` of ``horovod.torch`` or ``horovod.tensorflow`` wait for raysgd's next group."""
    common: Any = importlib.import_module("horovod.common.elastic")
    elastic: Any = importlib.import_module(f"horovod.{framework}.elastic")
    hvd: Any = importlib.import_module(f"horovod.{framework}")
    common.notification_manager = notices = Notices(lambda obj: hvd.broadcast_object(obj, name="raysgd"))
    elastic.init = lambda: notices.rejoin(rejoin)
    return notices
