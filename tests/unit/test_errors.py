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
from raysgd.controller.journal.outcome import outcome_data, outcome_error
from raysgd.controller.states import CALLBACK_NODE, Outcome
from raysgd.errors import AttemptEnded, RaySGDError, WorkerTraceback
from support.simulation import failed

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
    """The tree in the module's docstring: each error's parent, and the built-ins named next to it."""
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


def test_error_tree_matches_its_docstring() -> None:
    tree = drawn()
    assert set(tree) == {name for name, kind in vars(errors).items() if _is_error(kind)}
    for name, (parent, also) in tree.items():
        bases = {base.__name__ for base in getattr(errors, name).__bases__}
        assert bases == ({parent} if parent else set()) | also or (name == "RaySGDError" and bases == {"Exception"})


@pytest.mark.parametrize("kind", ALL)
def test_every_error_has_a_docstring_and_keeps_its_message(kind: type[RaySGDError]) -> None:
    assert (kind.__doc__ or "").strip()
    assert str(kind("what happened")) == "what happened"


def test_attempt_ended_is_not_an_exception() -> None:
    assert not issubclass(AttemptEnded, Exception)


# -- travelling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("kind", ALL)
def test_errors_keep_message_and_fields_when_pickled(kind: type[RaySGDError], duplicate: Any) -> None:
    error = kind("what happened", path="config['x']", ranks=(1, 2), key="loss")
    error.more = 5  # type: ignore[attr-defined]
    error.add_note("seen at night") if hasattr(error, "add_note") else None
    back = duplicate(error)
    assert type(back) is kind
    assert (str(back), vars(back)) == (str(error), vars(error))
    assert (back.path, back.ranks, back.key, back.more) == ("config['x']", (1, 2), "loss", 5)


def test_error_fields_have_defaults() -> None:
    assert errors.SerializationError("x").path == ""
    assert errors.MetricError("x").key == ""
    assert errors.UnsafeStateError("x").path == ""
    assert errors.TrainFuncError("x").type_name == ""
    assert (errors.WorkerDiedError("x").ranks, errors.WorkerDiedError("x").failures) == ((), 0)


@pytest.mark.parametrize("duplicate", COPIES)
def test_worker_traceback_can_be_pickled(duplicate: Any) -> None:
    error = WorkerTraceback("Traceback ...\nValueError: boom\n", 1, "node-1 (10.0.0.1)", ((0, "RuntimeError: gone"),))
    back = duplicate(error)
    assert (back.traceback, back.rank, back.node, back.followed) == (
        error.traceback,
        error.rank,
        error.node,
        error.followed,
    )
    assert str(back) == str(error)


def test_worker_traceback_names_rank_node_and_later_errors() -> None:
    text = str(WorkerTraceback("ValueError: boom\n", 1, "node-1 (10.0.0.1)", ((0, "RuntimeError: gone"),)))
    assert text.splitlines() == [
        "in the worker of rank 1 on node-1 (10.0.0.1):",
        "ValueError: boom",
        "errors that followed on other ranks:",
        "  rank 0: RuntimeError: gone",
    ]
    assert "followed" not in str(WorkerTraceback("ValueError: boom", 1, "node-1"))


@pytest.mark.parametrize("duplicate", COPIES)
def test_attempt_ended_can_be_pickled(duplicate: Any) -> None:
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
def test_successful_run_raises_nothing(kind: str) -> None:
    assert raised_for(Outcome(kind)) is None


def test_cancelled_run_raises_with_the_reason() -> None:
    error = raised_for(Outcome("cancelled", message="Ctrl-C"))
    assert isinstance(error, errors.RunCancelledError) and "Ctrl-C" in str(error)


def test_raysgd_error_is_raised_with_its_type_and_fields() -> None:
    error = raised_for(Outcome("error", error_type="WorkerDiedError", message="rank 1 died", ranks=(1,), failures=4))
    assert isinstance(error, errors.WorkerDiedError)
    assert (str(error), error.ranks, error.failures) == ("rank 1 died", (1,), 4)
    other = raised_for(Outcome("error", error_type="StorageError", message="disk full"))
    assert isinstance(other, errors.StorageError) and isinstance(other, OSError) and str(other) == "disk full"


def test_exception_of_train_func_is_raised_with_its_type_and_worker_traceback() -> None:
    failure = failed("code 7")
    failure = type(failure)(
        **{**vars(failure), "exception": cloudpickle.dumps(UsersError(7)), "traceback": "the trace"}
    )
    error = raised_for(Outcome("error", failed=failure, rank=1, node="node-1", followed=((0, "gone"),)))
    assert isinstance(error, UsersError) and error.code == 7
    cause = error.__cause__
    assert isinstance(cause, WorkerTraceback)
    assert (cause.traceback, cause.rank, cause.node, cause.followed) == ("the trace", 1, "node-1", ((0, "gone"),))


@pytest.mark.parametrize(
    ("pickled", "why"),
    [(None, "does not pickle"), (b"no pickle at all", "could not be rebuilt"), (pickle.dumps("text"), "boom")],
)
def test_exception_that_cannot_be_unpickled_is_raised_as_train_func_error(pickled: bytes | None, why: str) -> None:
    failure = failed("ValueError: boom", type_name="users.module.ValueError")
    failure = type(failure)(**{**vars(failure), "exception": pickled})
    error = raised_for(Outcome("error", failed=failure, rank=2, node="node-2"))
    assert isinstance(error, errors.TrainFuncError)
    assert error.type_name == "users.module.ValueError"
    assert "ValueError: boom" in str(error) and "raised on rank 2" in str(error) and why in str(error)
    assert isinstance(error.__cause__, WorkerTraceback)


def test_error_of_a_callback_names_the_process_of_the_callbacks() -> None:
    error = raised_for(Outcome("error", failed=failed("ValueError: boom"), node=CALLBACK_NODE))
    assert isinstance(error, errors.TrainFuncError)
    assert f"raised in {CALLBACK_NODE}" in str(error) and "None" not in str(error)
