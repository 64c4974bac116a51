"""The types that hold all values of the columns of text files, whatever order the values come in. Driver side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raysgd.data.reading.text import FALSE_CELLS, MISSING_CELLS, TRUE_CELLS

#: Up to this size all integers are floating-point numbers of 64 bits.
_EXACT = 2**53
_INTEGER = r"^\s*[+-]?[0-9]+\s*$"
#: Cells that are tried before all cells of a column are.
_NUM_TRIED = 64


@dataclass(frozen=True)
class ValueType:
    """The type that holds all values of a column.

    Attributes:
        kind: Their kind; ``null`` of a column without values.
        where: The file and the line of a value of this kind, for messages; None if it is not known.
        low, high: Range of the integers among numbers, with 0.
        has_fractions: Whether some numbers have fractions.
        item: The type of the items of lists.
        fields: The types of the values of objects, by key.
    """

    kind: Literal["null", "boolean", "number", "text", "list", "object"]
    where: tuple[str, int] | None = None
    low: int = 0
    high: int = 0
    has_fractions: bool = False
    item: ValueType | None = None
    fields: Mapping[str, ValueType] = field(default_factory=dict)

    def merge(self, other: ValueType) -> ValueType:
        """Return the type of the values of both.

        Raises:
            TypeConflictError: No type holds them.
        """
        if "null" in (self.kind, other.kind):
            return self if other.kind == "null" else other
        if self.kind != other.kind:
            raise TypeConflictError("", self, other)
        if self.kind == "number":
            low, high = min(self.low, other.low), max(self.high, other.high)
            has_fractions = self.has_fractions or other.has_fractions
            if (has_fractions and max(-low, high) > _EXACT) or not _fits(low, high):
                raise TypeConflictError("", self, other)
            is_larger = (low, high) != (self.low, self.high)
            is_new = (
                other.has_fractions if has_fractions and not self.has_fractions else is_larger and not has_fractions
            )
            where = other.where if is_new else self.where
            return replace(self, where=where, low=low, high=high, has_fractions=has_fractions)
        if self.kind == "list":
            assert self.item is not None and other.item is not None
            return replace(self, item=merge_fields({"[]": self.item}, {"[]": other.item})["[]"])
        return replace(self, fields=merge_fields(self.fields, other.fields)) if self.kind == "object" else self

    def to_arrow(self) -> Any:
        """Return the Arrow type that holds the values."""
        if self.kind == "number":
            if self.has_fractions:
                return pa.float64()
            return pa.int64() if self.high < 2**63 else pa.uint64()
        if self.kind == "list":
            assert self.item is not None
            return pa.list_(self.item.to_arrow())
        if self.kind == "object":
            return pa.struct([(key, each.to_arrow()) for key, each in self.fields.items()])
        return {"null": pa.null(), "boolean": pa.bool_(), "text": pa.string()}[self.kind]

    def describe(self) -> str:
        """Describe the values and where one of them is, for messages."""
        what = {"boolean": "a boolean", "text": "text", "list": "a list", "object": "an object"}.get(
            self.kind, "a number"
        )
        if self.kind == "number" and not self.has_fractions:
            what = f"the integer {self.low if self.low < 0 else self.high}"
        elif self.kind == "number":
            what = "a floating-point number"
        return what if self.where is None else f"{what} in {self.where[0]}, line {self.where[1]}"


class TypeConflictError(Exception):
    """No type holds two values.

    Attributes:
        key: The keys that lead to the values, such as ``boxes[].x``.
        one, other: The types of the two.
    """

    def __init__(self, key: str, one: ValueType, other: ValueType) -> None:
        super().__init__(key, one, other)
        self.key = key
        self.one = one
        self.other = other

    def __str__(self) -> str:
        if self.one == self.other:
            return f"column {self.key!r} has {self.one.describe()}, which no number of 64 bits holds: write it as text."
        what = f"column {self.key!r} has {self.one.describe()} and {self.other.describe()}"
        return f"{what}, which no type holds: write it with one type."


NULL = ValueType("null")
TEXT = ValueType("text")


def merge_fields(one: Mapping[str, ValueType], other: Mapping[str, ValueType]) -> dict[str, ValueType]:
    """Return the types of the values of both, by key, in the order in which the keys come first.

    Raises:
        TypeConflictError: No type holds the values of a key.
    """
    merged = dict(one)
    for key, value in other.items():
        with _below(key):
            merged[key] = merged[key].merge(value) if key in merged else value
    return merged


@contextmanager
def _below(key: str) -> Iterator[None]:
    """Put a key before those that lead to the values of a conflict."""
    try:
        yield
    except TypeConflictError as error:
        dot = "." if error.key and not error.key.startswith("[") else ""
        raise TypeConflictError(f"{key}{dot}{error.key}", error.one, error.other) from None


def _fits(low: int, high: int) -> bool:
    """Whether an integer type of 64 bits has this range."""
    return high < 2**63 if low < 0 else high < 2**64


def type_of_value(value: Any, where: tuple[str, int] | None = None) -> ValueType:
    """Return the type of a value that `json` read.

    Raises:
        TypeConflictError: No type holds it.
    """
    if value is None:
        return NULL
    if isinstance(value, bool):
        return ValueType("boolean", where)
    if isinstance(value, str):
        value.encode()  # fails for half of a surrogate pair
        return ValueType("text", where)
    if isinstance(value, int):
        number = ValueType("number", where, min(value, 0), max(value, 0))
        return number.merge(number)  # which checks the range
    if isinstance(value, float):
        return ValueType("number", where, has_fractions=True)
    if isinstance(value, list):
        item = NULL
        with _below("[]"):
            for each in value:
                item = item.merge(type_of_value(each, where))
        return ValueType("list", where, item=item)
    fields = {}
    for key, each in value.items():
        with _below(key):
            fields[key] = type_of_value(each, where)
    return ValueType("object", where, fields=fields)


def type_of_array(array: Any) -> ValueType | None:
    """Return the type of the values that pyarrow read from JSON; None if pyarrow may have rounded some."""
    kind = array.type
    if pa.types.is_null(kind):
        return NULL
    if pa.types.is_boolean(kind):
        return ValueType("boolean")
    if pa.types.is_integer(kind):
        low, high = _range(array)
        return ValueType("number", low=min(0, low), high=max(0, high))
    if pa.types.is_floating(kind):
        low, high = _range(array)
        return None if max(-low, high) >= _EXACT else ValueType("number", has_fractions=True)
    if pa.types.is_list(kind):
        item = type_of_array(array.flatten())
        return None if item is None else ValueType("list", item=item)
    if pa.types.is_struct(kind):
        columns = zip(kind, array.flatten(), strict=True)
        fields = {each.name: type_of_array(column) for each, column in columns}
        if None in fields.values():
            return None
        return ValueType("object", fields={key: each for key, each in fields.items() if each is not None})
    return TEXT  # also what pyarrow took for a time


def _range(numbers: Any) -> tuple[Any, Any]:
    found = pc.min_max(numbers)
    low, high = found["min"].as_py(), found["max"].as_py()
    return (0, 0) if low is None else (low, high)


def type_of_cells(cells: Any) -> tuple[ValueType, int]:
    """Return the type of the cells of a CSV column, and how many are missing. What loses digits or signs as a number is text."""
    tried = _type_of_present(_present(cells.slice(0, _NUM_TRIED)))
    if tried.kind == "text":
        return TEXT, 0
    numbers = _as_numbers(cells) if tried.kind == "number" else None
    present = _present(cells) if numbers is None else cells  # missing cells are not numbers
    return _type_of_present(present, numbers), len(cells) - len(present)


def _present(cells: Any) -> Any:
    return cells.filter(pc.invert(pc.is_in(cells, pa.array(MISSING_CELLS))))


def _type_of_present(cells: Any, numbers: Any = None) -> ValueType:
    if not len(cells):
        return NULL
    booleans = pa.array((*TRUE_CELLS, *FALSE_CELLS))
    if pc.is_in(cells[0], booleans).as_py():
        return ValueType("boolean") if pc.all(pc.is_in(cells, booleans)).as_py() else TEXT
    numbers = _as_numbers(cells) if numbers is None else numbers
    if numbers is None or _has_leading_zeros(cells):
        return TEXT
    low, high = _range(numbers)
    if not pa.types.is_floating(numbers.type):
        return ValueType("number", low=min(0, low), high=max(0, high))
    if max(-low, high) >= _EXACT:
        large = cells.filter(pc.greater_equal(pc.abs(numbers), float(_EXACT)))
        if any(abs(int(text)) > _EXACT for text in large.to_pylist() if re.match(_INTEGER, text)):
            return TEXT
    return ValueType("number", has_fractions=True)


def _as_numbers(cells: Any) -> Any:
    for trim in (lambda texts: texts, pc.ascii_trim_whitespace):
        texts = trim(cells)
        for kind in (pa.int64(), pa.uint64(), pa.float64()):
            try:
                return pc.cast(texts, kind)
            except pa.ArrowInvalid:
                continue
    return None


def _has_leading_zeros(cells: Any) -> bool:
    """Whether a number has further digits behind a zero at its begin, as codes do, or is hexadecimal."""
    _, offsets, data = cells.buffers()
    ends = np.frombuffer(offsets, np.int32)[cells.offset :][: len(cells) + 1]
    characters = np.frombuffer(data, np.uint8)[: ends[-1]]
    firsts = ends[:-1] + (characters[ends[:-1]] == ord("-"))
    firsts = firsts[firsts + 1 < ends[1:]]
    seconds = characters[firsts + 1][characters[firsts] == ord("0")]
    return bool(np.isin(seconds, np.frombuffer(b"0123456789xX", np.uint8)).any())
