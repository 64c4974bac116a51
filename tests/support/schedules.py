"""Schedules: sequences of actions on a model, chosen by Hypothesis, or by a number, which is ten times faster.

Hypothesis finds a short sequence for a failure. A schedule with a number is made again by its number alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

Method = TypeVar("Method", bound=Callable[..., Any])
Choices = dict[str, Sequence[Any]]
#: The name of a method of the model, and its arguments.
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Action:
    """What may happen: a method of the model, when it is possible, and from what its arguments are chosen."""

    name: str
    is_possible: Callable[[Any], Any]
    choices: Choices


def beginning(**choices: Sequence[Any]) -> Callable[[Method], Method]:
    """Mark the method by which every sequence begins."""

    def mark(method: Method) -> Method:
        return _marked(initialize(**_strategies(choices))(method), "beginning", method, None, choices)

    return mark


def action(is_possible: Callable[[Any], Any] | None = None, **choices: Sequence[Any]) -> Callable[[Method], Method]:
    """Mark a method that may be called while ``is_possible`` of the model is true."""

    def mark(method: Method) -> Method:
        marked: Any = rule(**_strategies(choices))(method)
        if is_possible is not None:
            marked = precondition(is_possible)(marked)
        return _marked(marked, "action", method, is_possible, choices)

    return mark


def run_schedule(model: type[RuleBasedStateMachine], seed: int, number: int, num_actions: int) -> None:
    """Do the actions of one schedule, and what the model does at the end.

    Raises:
        AssertionError: The model found something wrong; the message has the actions that are needed for it.
    """
    choice = random.Random(f"{seed} {number}")
    calls: list[Call] = []
    try:
        for call in _choose(model, choice, num_actions):
            calls.append(call)
    except Exception:
        calls, error = _shrink(model, calls)
        needed = "\n  ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls
        )
        raise AssertionError(f"schedule {seed}:{number} breaks a promise:\n  {needed}") from error


def _choose(model: type[RuleBasedStateMachine], choice: random.Random, num_actions: int) -> Iterator[Call]:
    """Yield each call before it is made, also that of the end."""
    one = model()
    (begin,), actions = _actions_of(model, "beginning"), _actions_of(model, "action")
    for each in range(1 + num_actions):
        act = choice.choice(actions) if each else begin
        while not act.is_possible(one):
            act = choice.choice(actions)
        call = act.name, {name: options[choice.randrange(len(options))] for name, options in act.choices.items()}
        yield call
        getattr(one, call[0])(**call[1])
    one.teardown()


def _shrink(model: type[RuleBasedStateMachine], calls: list[Call]) -> tuple[list[Call], Exception]:
    """Leave out calls that are not needed for an error, and return the others with it."""
    error = _error_of(model, calls)
    assert error is not None, "the schedule fails only sometimes"
    index = len(calls) - 1
    while index > 0:
        fewer = calls[:index] + calls[index + 1 :]
        if (found := _error_of(model, fewer)) is not None:
            calls, error = fewer, found
            index = len(calls)
        index -= 1
    return calls, error


def repeat(model: type[RuleBasedStateMachine], calls: Sequence[Call]) -> None:
    """Make these calls, and what the model does at the end; calls that are not possible where they stand are left out."""
    if (error := _error_of(model, list(calls))) is not None:
        raise error


def _error_of(model: type[RuleBasedStateMachine], calls: list[Call]) -> Exception | None:
    """Return the error of these calls and of the end, or None; see `repeat`."""
    one, is_possible = model(), {act.name: act.is_possible for act in _actions_of(model, "action")}
    try:
        for index, (name, given) in enumerate(calls):
            if not index or is_possible[name](one):
                getattr(one, name)(**given)
        one.teardown()
    except Exception as error:
        return error
    return None


def _strategies(choices: Choices) -> dict[str, Any]:
    return {name: st.sampled_from(options) for name, options in choices.items()}


def _marked(marked: Any, kind: str, method: Any, is_possible: Callable[[Any], Any] | None, choices: Choices) -> Any:
    setattr(marked, f"_{kind}", Action(method.__name__, is_possible or (lambda model: True), choices))
    return marked


def _actions_of(model: type, kind: str) -> list[Action]:
    found = (getattr(getattr(model, name), f"_{kind}", None) for name in sorted(vars(model)))
    return [each for each in found if each is not None]
