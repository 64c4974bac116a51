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

    def save(self) -> None:
        self.calls.append("save")

    def sync(self) -> None:
        self.calls.append("sync")

    def on_hosts_updated(self, timestamp: int, result: Any) -> None:
        self.calls.append("hosts")


class FakeSession:
    """A session that stands somewhere in its datasets."""

    def __init__(self, position: int | None = 0) -> None:
        self.position = position

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
    notices, state = Notices(lambda obj: {"train": 12}), FakeState()
    notices.register_listener(state)
    state.sync()
    assert session.position == 12
    session.position = 15
    state.sync()  # without a commit in between: it stands there again
    assert session.position == 12


def test_without_datasets_nothing_is_sent(session: FakeSession) -> None:
    session.position = None
    sent: list[Any] = []
    notices, state = Notices(lambda obj: sent.append(obj)), FakeState()
    notices.register_listener(state)
    state.save()
    state.sync()
    assert sent == []


def test_a_state_is_as_it_was_when_its_function_has_ended(session: FakeSession) -> None:
    notices, state = Notices(lambda obj: obj), FakeState()
    assert not notices.is_heard
    notices.register_listener(state)
    assert notices.is_heard
    notices.remove_listener(state)
    assert not notices.is_heard
    assert set(vars(state)) == {"calls"}


@needs_horovod
def test_a_change_is_told_to_states_of_functions_that_run(session: FakeSession) -> None:
    notices, state = Notices(lambda obj: obj), FakeState()
    assert notices.hosts_changed() is False
    notices.register_listener(state)
    assert notices.hosts_changed() is True
    assert state.calls == ["hosts"]


def test_who_recovers_is_one_of_two() -> None:
    assert not raysgd.HorovodConfig().recovers_inside
    assert raysgd.HorovodConfig(elastic="horovod").recovers_inside
    with pytest.raises(ConfigError, match="elastic"):
        raysgd.HorovodConfig(elastic="both")
