"""Lazy `ray.data.Dataset`s: their execution, and their blocks as Tables.

Ray is not imported here: who holds such a dataset, or a block of one, has done so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raysgd._util.imported import imported
from raysgd.data.stream import InlineStream, Produced

_lock = threading.Lock()
#: Options that are set to keep the order: how many executions use them, and what they were.
_ordering: dict[int, tuple[int, bool]] = {}


def execute(dataset: Any) -> Iterator[Produced]:
    """Execute a dataset with the order of its rows kept; its blocks as they come, as ``(reference, range of rows)``.

    Closing the iterator stops the execution.
    """
    with _ordered(dataset.context.execution_options):
        for bundle in dataset.iter_internal_ref_bundles():
            columns = tuple(bundle.schema.names) if bundle.schema is not None else ()
            is_of_arrow = hasattr(
                bundle.schema, "remove_metadata"
            )  # blocks may be frames, whose schema is one of Ray's
            schema = bundle.schema if is_of_arrow else None
            for entry, part in zip(bundle.blocks, bundle.slices, strict=True):
                whole = entry.metadata
                rows = range(whole.num_rows) if part is None else range(part.start_offset, part.end_offset)
                num_bytes = (whole.size_bytes or 0) * len(rows) // max(1, whole.num_rows)
                yield Produced((entry.ref, rows), len(rows), num_bytes, columns, schema)


@contextmanager
def _ordered(options: Any) -> Iterator[None]:
    """Ray keeps the order of rows where these options are those of an execution; several may be under way with them."""
    with _lock:
        count, before = _ordering.get(id(options), (0, options.preserve_order))
        _ordering[id(options)] = count + 1, before
        options.preserve_order = True
    try:
        yield
    finally:
        with _lock:
            count, before = _ordering.pop(id(options))
            if count > 1:
                _ordering[id(options)] = count - 1, before
            else:
                options.preserve_order = before


def table_of(block: Any, rows: range) -> Any:
    """These rows of a block as a Table, each column in one chunk; in shared memory where Ray has it in Arrow's form."""
    table: Any = imported("ray.data.block").BlockAccessor.for_block(block).to_arrow()
    if len(rows) != table.num_rows:
        table = table.slice(rows.start, len(rows))
    return table if all(column.num_chunks == 1 for column in table.columns) else table.combine_chunks()


def fetched(value: Any) -> Any:
    """What a reference to an object in Ray's store stands for; anything else is that itself."""
    ray = imported("ray")
    return ray.get(value) if ray is not None and isinstance(value, ray.ObjectRef) else value


def inline_stream(dataset: Any) -> InlineStream:
    """A dataset that is executed by who reads it."""

    def fetch(ref: Any) -> Any:
        block, rows = ref
        return table_of(imported("ray").get(block), rows)

    return InlineStream(lambda: execute(dataset), fetch)
