"""A run's outcome as data for readers, and the exception that readers make of that data."""

from __future__ import annotations

from typing import Any

from raysgd import errors
from raysgd.controller.states import Outcome


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as a frame's data. Controller side: the user's exception stays a pickle."""
    failed = outcome.failed
    data: dict[str, Any] = {
        "kind": outcome.kind,
        "message": outcome.message,
        "error_type": outcome.error_type,
        "rank": outcome.rank,
        "ranks": list(outcome.ranks),
        "failures": outcome.failures,
        "node": outcome.node,
        "followed": [list(item) for item in outcome.followed],
    }
    if outcome.key:
        data["key"] = outcome.key
    if failed is not None:
        data |= {"type_name": failed.type_name, "summary": failed.summary, "traceback": failed.traceback}
        data["exception"] = failed.exception
    return data


def outcome_error(data: dict[str, Any]) -> BaseException | None:
    """Return the exception to raise for the outcome, or None. Reader side: unpickles the user's exception."""
    if data["kind"] == "cancelled":
        return errors.RunCancelledError(f"the run was cancelled: {data['message']}")
    if data["kind"] != "error":
        return None
    if "summary" not in data:
        kind = getattr(errors, data["error_type"] or "", errors.WorkerError)
        if "key" in data:
            return kind(data["message"], key=data["key"])
        return kind(data["message"], ranks=tuple(data["ranks"]), failures=data["failures"])
    followed = tuple((rank, line) for rank, line in data["followed"])
    cause = errors.WorkerTraceback(data["traceback"], data["rank"], data["node"], followed)
    error = _user_error(data)
    error.__cause__ = cause
    if data.get("failures"):  # it was retried before
        error.__notes__ = [*getattr(error, "__notes__", ()), data["message"]]
    return error


def _user_error(data: dict[str, Any]) -> BaseException:
    reason = "does not pickle" if "exception" in data else "was lost with the controller's process"
    if data.get("exception") is not None:
        import cloudpickle

        try:
            error = cloudpickle.loads(data["exception"])
            if isinstance(error, BaseException):
                return error
        except Exception as problem:  # its module may be missing here, or its __init__ may take other arguments
            reason = f"could not be rebuilt here: {type(problem).__name__}: {problem}"
    place = f"on rank {data['rank']}" if data["rank"] is not None else f"in {data['node']}"
    return errors.TrainFuncError(
        f"{data['summary']} (raised {place}; its type {data['type_name']} {reason})",
        type_name=data["type_name"],
    )
