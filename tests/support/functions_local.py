"""Runs of `raysgd.functions` in this process, in place of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import raysgd
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.config import CheckpointConfig
from raysgd.session import api
from raysgd.trainer.resume_from import FoundCheckpoint
from raysgd.workers.pickling import dumps, loads


class LocalRuns:
    """Runs the tasks of a `Deployer` in this process, each in a folder as a run of workers has it."""

    def __init__(self, folder: Path) -> None:
        self.trainer = self
        self.trained: Any = None
        self._folder = folder
        self._number = len([*folder.glob("run_*")])

    def run(
        self,
        task: Callable[[], Any],
        config: Mapping[str, Any],
        dataset: Mapping[str, Any],
        *,
        start: Any = None,
        callbacks: Any = (),
        checkpoint_config: CheckpointConfig | None = None,
    ) -> Any:
        self._number += 1
        with raysgd.local(dataset=dataset or None, dir=self._store.storage.path_of("")), ExitStack() as stack:
            if isinstance(start, FoundCheckpoint):
                assert start.checkpoint is not None
                raysgd.save_checkpoint(start.checkpoint.load())
                stack.callback(self._store.delete, 1)  # a run of workers does not save what it begins with
            elif start is not None:
                load = api.load_checkpoint
                stack.enter_context(
                    mock.patch.object(
                        api, "load_checkpoint", lambda *path: load(*path) if path else loads(dumps(start))
                    )
                )
            return task()

    def find_epochs(self, of: Any, begin: Any) -> None:
        """There is no live run: each call of train() is a run."""

    def end_epochs(self) -> None:
        """There is nothing to end."""

    @property
    def run_dir(self) -> str:
        return str(self._folder / f"run_{self._number}")

    @property
    def _store(self) -> CheckpointStore:
        return CheckpointStore(Storage.from_uri(self.run_dir).child("checkpoints"))

    def list_checkpoints(self) -> list[Checkpoint]:
        return [Checkpoint.from_path(self._store.path(each.number)) for each in self._store.list()]

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._store.delete(int(str(checkpoint.path)[-6:]))
