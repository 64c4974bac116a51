"""Deletes the folder of a run. Runs anywhere, without Ray."""

from __future__ import annotations

from raysgd.checkpoint.links import make_links
from raysgd.checkpoint.storage.storage import Storage
from raysgd.config.run import CheckpointConfig
from raysgd.controller.journal.journal import is_live, read_description
from raysgd.errors import UsageError
from raysgd.runs.finding import FILE_OF_RUN, run_name

_LINKED_BY = ("links", "keep_best", "score_attribute", "score_order")


def delete_run(run: Storage, *, is_lost: bool = False) -> None:
    """Delete the folder of a run with its checkpoints. ``last`` and ``best`` then lead to those of other runs. Blocks.

    Args:
        run: The run's folder; nothing happens if it is not that of a run.
        is_lost: The run is not live, although its files have no end, or cannot be read.

    Raises:
        UsageError: The run is live or paused, by its files.
        CheckpointCorruptError: Its files are damaged.
    """
    if not is_lost:
        check_can_be_deleted(run)
    given = {} if is_lost else read_description(run).get("checkpoint_config") or {}
    run.parent().delete_tree(run.name, FILE_OF_RUN.pattern)
    links = make_links(run, CheckpointConfig(**{name: given[name] for name in _LINKED_BY if name in given}))
    if links is not None:
        links.repair()


def check_can_be_deleted(run: Storage) -> None:
    """Check that a run is not live. Errors as for `delete_run`."""
    if is_live(run):
        raise UsageError(f"{run_name(run)} is live or paused, by its files, and cannot be deleted; stop it first.")
