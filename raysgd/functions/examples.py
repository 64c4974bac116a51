"""The examples that a user gives, as a dataset of raysgd: each stays the object that it is. Any process, no JAX."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from raysgd._util.text import with_article
from raysgd.errors import ConfigError

#: Examples whose keys are compared at a time.
_CHUNK = 10_000


class ExampleRef:
    """A reference to one example, which is loaded by the processes that collate it."""

    __slots__ = ("_examples", "row")

    def __init__(self, examples: Any, row: int) -> None:
        self._examples = examples
        self.row = row

    def load(self) -> Any:
        return self._examples[self.row]


@dataclass(frozen=True)
class Examples:
    """A map-style dataset whose rows are references to examples, so that no process loads the rows of others.

    Attributes:
        examples: Anything with ``__len__`` and ``__getitem__``.
    """

    examples: Any

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> ExampleRef:
        return ExampleRef(self.examples, row)


def check_examples(name: str, examples: Any) -> Examples:
    """Check a list of examples.

    Raises:
        ConfigError: It has no examples, is not a sequence, or is a list of dicts with different keys.
    """
    is_sequence = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    if not is_sequence or isinstance(examples, (str, bytes, Mapping)):
        raise ConfigError(
            f"{name} is {with_article(type(examples).__name__)}; give a list of examples, or another sequence with a length."
        )
    if not len(examples):
        raise ConfigError(f"{name} is empty; give at least one example.")
    if isinstance(examples, (list, tuple)) and isinstance(examples[0], Mapping):
        _check_keys(name, examples)
    return Examples(examples)


def _check_keys(name: str, examples: Sequence[Any]) -> None:
    keys = examples[0].keys()
    get_all = itemgetter(*keys) if keys else len
    for start in range(0, len(examples), _CHUNK):
        chunk = examples[start : start + _CHUNK]
        try:  # loops in C, as there may be millions
            is_same = set(map(type, chunk)) == {dict} and set(map(len, chunk)) == {len(keys)}
            deque(map(get_all, chunk if is_same else ()), maxlen=0)
        except KeyError:
            is_same = False
        if not is_same:
            _check_each(name, keys, start, chunk)


def _check_each(name: str, keys: Any, start: int, examples: Sequence[Any]) -> None:
    for row, example in enumerate(examples, start):
        if not isinstance(example, Mapping):
            raise ConfigError(
                f"{name}[{row}] is {with_article(type(example).__name__)}, and {name}[0] is a dict; give examples of one kind."
            )
        if example.keys() != keys:
            odd = sorted(map(str, example.keys() ^ keys))
            raise ConfigError(
                f"{name}[{row}] and {name}[0] have different keys: {', '.join(odd)} {'are' if len(odd) > 1 else 'is'} in one of "
                "them only. Give all examples the same keys, such as None for what is missing."
            )


#: The names that a value may have: the key of loss_fn and pred_fn, and a module of nnx in place of parameters.
_NAMES = {"rng": ("rng", "train_rng", "pred_rng"), "model": ("model", "params")}


def call_by_name(function: Callable[..., Any], **values: Any) -> Any:
    """Call one of the user's functions by the names of its parameters, or else by position.

    Arguments that are bound by `functools.partial` may so stand anywhere. A function that has names of some values alone, and
    cannot take all by position, gets these: ``loss_fn(model, batch)``.

    Args:
        function: The function.
        values: What it gets, in the order of its positions. ``rng`` may be called ``train_rng`` or ``pred_rng``, and ``model``
            also ``params``.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return function(*values.values())
    parameters = signature.parameters
    known = {name for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    named: dict[str, Any] = {}
    for name, value in values.items():
        found = known.intersection(_NAMES.get(name, (name,)))
        if len(found) == 1:
            named[found.pop()] = value
    if len(named) < len(values) and (not named or _can_bind(signature, *values.values())):
        return function(*values.values())
    return function(**named)


def _can_bind(signature: inspect.Signature, *values: Any) -> bool:
    try:
        signature.bind(*values)
    except TypeError:
        return False
    return True


def check_callable(name: str, value: Any, signature: str, *, may_be_none: bool = False) -> Callable[..., Any]:
    """Check one of the user's functions.

    Raises:
        ConfigError: It is not callable.
    """
    if not callable(value) and not (value is None and may_be_none):
        raise ConfigError(f"{name}={value!r:.80} is not callable; give a function {signature}.")
    return value  # type: ignore[no-any-return]
