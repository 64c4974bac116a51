"""Calls ``collate_fn`` with the columns or with the rows of a batch, whichever it takes. Worker side; imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.batches.values import writeable
from raysgd.data.reading.readers import Arrays
from raysgd.errors import ConfigError

#: Packages whose collators take a list of rows.
_OF_ROWS = ("transformers", "torch.utils.data")
#: What a function raises that was written for another kind of argument.
_WRONG_ARGUMENT = (TypeError, KeyError, IndexError, AttributeError, ValueError)


class Collator:
    """Makes batches of a table by a user's function, of the kind of argument that it takes.

    A function of raysgd takes a dict of NumPy arrays by column. The collators of torch and transformers take a list of dicts, one
    for each row. They are recognized by their package; of any other function the first batch decides: one that fails on the dict
    is called with the list, and keeps to it if that succeeds.

    Args:
        function: The user's.
        dataset: Its name for messages.
    """

    def __init__(self, function: Callable[[Any], Any], dataset: str) -> None:
        self._function = function
        self._dataset = dataset
        self._takes_rows = True if _is_of_rows(function) else None

    def __call__(self, arrays: Arrays) -> Any:
        """Return the batch of these columns."""
        if self._takes_rows is None:
            return self._first(arrays)
        return self._function(rows_of(arrays) if self._takes_rows else _columns_of(arrays))

    def _first(self, arrays: Arrays) -> Any:
        try:
            batch = self._function(_columns_of(arrays))
        except _WRONG_ARGUMENT as error:
            try:
                batch = self._function(rows_of(arrays))
            except _WRONG_ARGUMENT:
                name = getattr(self._function, "__name__", type(self._function).__name__)
                raise ConfigError(
                    f"collate_fn {name} of dataset {self._dataset!r} raised {type(error).__name__}: {error}. It gets a dict of "
                    f"NumPy arrays by column ({', '.join(map(repr, arrays))}); one that takes a list of dicts, one for each row, "
                    "works too, but this one raised an error for both."
                ) from error
            self._takes_rows = True
            return batch
        self._takes_rows = False
        return batch


def rows_of(arrays: Arrays) -> list[dict[str, Any]]:
    """Return the rows of a batch as dicts: single numbers and strings as Python's, rows with axes as arrays."""
    names = list(arrays)
    columns = [_values_of(array) for array in arrays.values()]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values_of(array: NDArray[Any]) -> list[Any]:
    if array.ndim == 1 and array.dtype.kind in "biufUS":
        values: list[Any] = array.tolist()  # integers of NumPy are not int, and collators make floats of them
        return values
    return [writeable(each) if isinstance(each, np.ndarray) else each for each in array]


def _columns_of(arrays: Arrays) -> Arrays:
    return {column: writeable(array) for column, array in arrays.items()}


def _is_of_rows(function: Any) -> bool:
    while hasattr(function, "func"):  # of functools.partial
        function = function.func
    if hasattr(function, "__qualname__"):  # a function
        modules = [str(getattr(function, "__module__", ""))]
    else:
        modules = [each.__module__ for each in type(function).__mro__]
    return any(f"{module}.".startswith(f"{package}.") for module in modules for package in _OF_ROWS)
