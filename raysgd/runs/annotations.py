"""The title, tags and notes that people give a run, in one file of its folder. Runs anywhere, without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import CheckpointCorruptError, CheckpointNotFoundError

_FILE = "annotations.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Annotations:
    """The title, the tags and the notes of a run.

    Attributes:
        title: The name that lists show for it; empty: that of its folder.
        tags: Words by which lists are filtered, each once.
        notes: Text.
    """

    title: str = ""
    tags: tuple[str, ...] = ()
    notes: str = ""


def read_annotations(run: Storage) -> Annotations:
    """Return the title, tags and notes of a run; empty if it has none.

    Raises:
        CheckpointCorruptError: The file is damaged.
    """
    try:
        found = json.loads(run.read_bytes(_FILE, _MAX_BYTES))
        title, notes, tags = found["title"], found["notes"], tuple(found["tags"])
        if not all(isinstance(text, str) for text in (title, notes, *tags)):
            raise TypeError("it has a value that is not text")
    except CheckpointNotFoundError:
        return Annotations()
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointCorruptError(f"{run.path_of(_FILE)} is damaged ({error}); delete the file.") from error
    return Annotations(title, tags, notes)


def annotate(
    run: Storage, *, title: str | None = None, tags: Iterable[str] | None = None, notes: str | None = None
) -> Annotations:
    """Change what is given of a run's title, tags and notes; return all of them. The folder keeps its name.

    Args:
        run: The run's folder; the run may be live.
        title: The new title; empty: none.
        tags: All tags that the run has then.
        notes: The new text.
    """
    changes: dict[str, Any] = {}
    if title is not None:
        changes["title"] = title.strip()
    if tags is not None:
        changes["tags"] = tuple(dict.fromkeys(filter(None, (tag.strip() for tag in tags))))
    if notes is not None:
        changes["notes"] = notes
    changed = replace(read_annotations(run), **changes)
    run.write_bytes(_FILE, json.dumps(asdict(changed), indent=2).encode())
    return changed
