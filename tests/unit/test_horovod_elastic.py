"""The place in the datasets as a part of an elastic state of Horovod's."""

from __future__ import annotations

from typing import Any

import pytest

import raysgd
from raysgd.backends.horovod_elastic import Notices
from raysgd.errors import ConfigError
from raysgd.session import context
from support.frameworks import needs_horovod


class FakeState:
    """What Horovod's states have of methods."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.problem: Exception | None = None

    def save(self) -> None:
        self.calls.append("save")

    def commit(self) -> None:
        raise AssertionError("this one saves before it hears of the others")

    def check_host_updates(self) -> None:
        self.calls.append("check")
        if self.problem is not None:
            raise self.problem

    def sync(self) -> None:
        self.calls.append("sync")

    def on_reset(self) -> None:
        self.calls.append("reset")

    def on_hosts_updated(self, timestamp: int, result: Any) -> None:
        self.calls.append("hosts")


class FakeSession:
    """A session that stands somewhere in its datasets, and in its rounds."""

    def __init__(self, position: int | None = 0, iteration: int = 0) -> None:
        self.position = position
        self.iteration = iteration
        self.is_handed_on = False

    def hand_on(self) -> None:
        self.is_handed_on = True

    def data_positions(self) -> dict[str, Any]:
        return {} if self.position is None else {"train": self.position}

    def go_on_in_data(self, positions: dict[str, Any]) -> None:
        self.position = positions["train"]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    made = FakeSession()
    monkeypatch.setattr(context, "current", lambda: made)
    return made


def test_what_was_read_after_the_last_commit_is_read_again(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices, state = Notices(lambda obj: obj), FakeState()
    notices.register_listener(state)
    session.position = 6
    state.save()
    session.position = 9
    other = FakeSession(0)  # of the next attempt, on a rank that went on
    monkeypatch.setattr(context, "current", lambda: other)
    state.sync()
    assert other.position == 6
    assert state.calls == ["save", "sync"]


def test_a_newcomer_stands_where_rank_0_does(session: FakeSession) -> None:
    notices, state = Notices(lambda obj: (3, {"train": 12})), FakeState()
    notices.register_listener(state)
    state.sync()
    assert (notices.iteration, session.position) == (3, 12)
    session.position = 15
    state.sync()  # without a commit in between: it stands there again
    assert session.position == 12


@needs_horovod
def test_a_state_stands_after_the_rounds_of_its_last_commit(session: FakeSession) -> None:
    session.position, session.iteration = None, 4
    notices, state = Notices(lambda obj: obj), FakeState()
    assert notices.iteration is None
    notices.register_listener(state)
    assert notices.iteration == 4
    session.iteration = 7
    state.commit()
    session.iteration = 9
    assert notices.iteration == 7
    state.sync()
    assert notices.iteration == 7
    assert state.calls == ["check", "save", "sync"]


@needs_horovod
def test_all_ranks_commit_or_none(session: FakeSession) -> None:
    """One that has died may have made a round less than the others."""
    notices, state = Notices(lambda obj: obj), FakeState()
    notices.register_listener(state)
    session.iteration, state.problem = 1, RuntimeError("a rank is gone")
    with pytest.raises(RuntimeError):
        state.commit()
    assert session.is_handed_on  # what was reported is on its way when others hear that this rank is here
    assert (state.calls, notices.iteration) == (["check"], 0)


@needs_horovod
def test_what_is_committed_counts_where_the_group_changes_then(session: FakeSession) -> None:
    from horovod.common.exceptions import HostsUpdatedInterrupt

    notices, state = Notices(lambda obj: obj), FakeState()
    notices.register_listener(state)
    session.iteration, state.problem = 1, HostsUpdatedInterrupt(False)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    assert (state.calls, notices.iteration) == (["check", "save"], 1)


def test_a_state_is_as_it_was_when_its_function_has_ended(session: FakeSession) -> None:
    notices, state = Notices(lambda obj: obj), FakeState()
    assert not notices.is_heard
    notices.register_listener(state)
    assert notices.is_heard
    notices.remove_listener(state)
    assert not notices.is_heard
    assert set(vars(state)) == {"calls", "problem"}


@needs_horovod
def test_a_change_is_told_to_states_of_functions_that_run(session: FakeSession) -> None:
    notices, state = Notices(lambda obj: obj), FakeState()
    assert notices.hosts_changed() is False
    notices.register_listener(state)
    assert notices.hosts_changed() is True
    assert state.calls == ["hosts"]


@needs_horovod
def test_who_is_between_two_groups_cannot_be_told(session: FakeSession) -> None:
    """Horovod forgets what it was told when the next group has formed."""
    from horovod.common.exceptions import HostsUpdatedInterrupt

    told: list[tuple[int | None, bool, bool]] = []
    notices, state = Notices(lambda obj: obj), FakeState()
    notices.register_listener(state)
    for state.problem in (HostsUpdatedInterrupt(False), None):
        if state.problem is not None:
            with pytest.raises(HostsUpdatedInterrupt):
                state.commit()
        notices.rejoin(lambda iteration, is_broken: told.append((iteration, is_broken, notices.hosts_changed())))
        state.on_reset()
        assert notices.hosts_changed()
    assert told == [(0, False, False), (0, True, False)]


def test_who_recovers_is_one_of_two() -> None:
    assert not raysgd.HorovodConfig().recovers_inside
    assert raysgd.HorovodConfig(elastic="horovod").recovers_inside
    with pytest.raises(ConfigError, match="elastic"):
        raysgd.HorovodConfig(elastic="both")
