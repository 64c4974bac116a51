"""The error tree: each error is also the built-in a caller would catch, and travels with all it carries."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any

import cloudpickle
import pytest

from raysgd import errors
from raysgd.controller.outcome import outcome_data, outcome_error
from raysgd.controller.states import Outcome
from raysgd.errors import AttemptEnded, RaySGDError, WorkerTraceback
from raysgd.testing.simulation import failed

ALL = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, RaySGDError)]
COPIES: list[Any] = [
    copy.copy,
    copy.deepcopy,
    lambda error: pickle.loads(pickle.dumps(error)),
    lambda error: cloudpickle.loads(cloudpickle.dumps(error)),
]


def _is_error(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, BaseException)


# -- the tree ----------------------------------------------------------------------------------------------------------


def drawn() -> dict[str, tuple[str | None, set[str]]]:
    """The tree in the module's docstring: each error's parent, and the built-ins named beside it."""
    tree: dict[str, tuple[str | None, set[str]]] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    (?P<lines>[ │├└─]*)(?P<name>[A-Z]\w+)(?: \((?P<also>[^)]*)\))?(?:\s|$)", line)
        if found is None:
            continue
        depth = len(found["lines"])
        while path and path[-1][0] >= depth:
            path.pop()
        also = set((found["also"] or "").split(", ")) - {""}
        tree[found["name"]] = (path[-1][1] if path else None, also)
        path.append((depth, found["name"]))
    return tree


def test_the_tree_is_as_it_is_drawn() -> None:
    tree = drawn()
    assert set(tree) == {name for name, kind in vars(errors).items() if _is_error(kind)}
    for name, (parent, also) in tree.items():
        bases = {base.__name__ for base in getattr(errors, name).__bases__}
        assert bases == ({parent} if parent else set()) | also or (name == "RaySGDError" and bases == {"Exception"})


@pytest.mark.parametrize("kind", ALL)
def test_every_error_says_what_it_is(kind: type[RaySGDError]) -> None:
    assert (kind.__doc__ or "").strip()
    assert str(kind("what happened")) == "what happened"


def test_an_ended_attempt_is_not_caught_by_accident() -> None:
    assert not issubclass(AttemptEnded, Exception)


# -- travelling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("kind", ALL)
def test_every_error_travels_with_its_message_and_its_fields(kind: type[RaySGDError], duplicate: Any) -> None:
    error = kind("what happened", path="config['x']", ranks=(1, 2), key="loss")
    error.more = 5  # type: ignore[attr-defined]
    error.add_note("seen at night") if hasattr(error, "add_note") else None
    back = duplicate(error)
    assert type(back) is kind
    assert (str(back), vars(back)) == (str(error), vars(error))
    assert (back.path, back.ranks, back.key, back.more) == ("config['x']", (1, 2), "loss", 5)


def test_fields_have_defaults_so_that_they_can_be_asked_for() -> None:
    assert errors.SerializationError("x").path == ""
    assert errors.MetricError("x").key == ""
    assert errors.UnsafeStateError("x").path == ""
    assert errors.TrainFuncError("x").type_name == ""
    assert (errors.WorkerDiedError("x").ranks, errors.WorkerDiedError("x").failures) == ((), 0)


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_workers_traceback_travels_too(duplicate: Any) -> None:
    error = WorkerTraceback("Traceback ...\nValueError: boom\n", 1, "node-1 (10.0.0.1)", ((0, "RuntimeError: gone"),))
    back = duplicate(error)
    assert (back.traceback, back.rank, back.node, back.followed) == (
        error.traceback,
        error.rank,
        error.node,
        error.followed,
    )
    assert str(back) == str(error)


def test_a_workers_traceback_tells_where_and_what_followed() -> None:
    text = str(WorkerTraceback("ValueError: boom\n", 1, "node-1 (10.0.0.1)", ((0, "RuntimeError: gone"),)))
    assert text.splitlines() == [
        "in the worker of rank 1 on node-1 (10.0.0.1):",
        "ValueError: boom",
        "errors that followed on other ranks:",
        "  rank 0: RuntimeError: gone",
    ]
    assert "followed" not in str(WorkerTraceback("ValueError: boom", 1, "node-1"))


@pytest.mark.parametrize("duplicate", COPIES)
def test_the_end_of_an_attempt_travels(duplicate: Any) -> None:
    assert str(duplicate(AttemptEnded("rank 1 died"))) == "rank 1 died"


# -- from a run's outcome ----------------------------------------------------------------------------------------------


class UsersError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> Any:
        return UsersError, (self.code,)


def raised_for(outcome: Outcome) -> BaseException | None:
    return outcome_error(outcome_data(outcome))


@pytest.mark.parametrize("kind", ["done", "stopped"])
def test_a_run_that_ended_well_raises_nothing(kind: str) -> None:
    assert raised_for(Outcome(kind)) is None


def test_a_cancelled_run_says_why() -> None:
    error = raised_for(Outcome("cancelled", message="Ctrl-C"))
    assert isinstance(error, errors.RunCancelledError) and "Ctrl-C" in str(error)


def test_an_error_of_ours_is_raised_as_its_type_with_its_fields() -> None:
    error = raised_for(Outcome("error", error_type="WorkerDiedError", message="rank 1 died", ranks=(1,), failures=4))
    assert isinstance(error, errors.WorkerDiedError)
    assert (str(error), error.ranks, error.failures) == ("rank 1 died", (1,), 4)
    other = raised_for(Outcome("error", error_type="StorageError", message="disk full"))
    assert isinstance(other, errors.StorageError) and isinstance(other, OSError) and str(other) == "disk full"


def test_an_exception_of_train_func_is_raised_as_its_own_type_with_the_workers_traceback() -> None:
    said = failed("code 7")
    said = type(said)(**{**vars(said), "exception": cloudpickle.dumps(UsersError(7)), "traceback": "the trace"})
    error = raised_for(Outcome("error", failed=said, rank=1, node="node-1", followed=((0, "gone"),)))
    assert isinstance(error, UsersError) and error.code == 7
    cause = error.__cause__
    assert isinstance(cause, WorkerTraceback)
    assert (cause.traceback, cause.rank, cause.node, cause.followed) == ("the trace", 1, "node-1", ((0, "gone"),))


@pytest.mark.parametrize(
    ("pickled", "why"),
    [(None, "does not pickle"), (b"no pickle at all", "could not be rebuilt"), (pickle.dumps("text"), "boom")],
)
def test_an_exception_that_cannot_be_brought_here_is_told_in_words(pickled: bytes | None, why: str) -> None:
    said = failed("ValueError: boom", type_name="users.module.ValueError")
    said = type(said)(**{**vars(said), "exception": pickled})
    error = raised_for(Outcome("error", failed=said, rank=2, node="node-2"))
    assert isinstance(error, errors.TrainFuncError)
    assert error.type_name == "users.module.ValueError"
    assert "ValueError: boom" in str(error) and "rank 2" in str(error) and why in str(error)
    assert isinstance(error.__cause__, WorkerTraceback)
