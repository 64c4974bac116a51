"""What a run writes to storage: its journal, and the commits of its checkpoints. Runs in the TrainerActor."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.links import CheckpointLinks, run_names
from raysgd.checkpoint.storage.storage import Retry, Storage
from raysgd.checkpoint.store import CheckpointStore
from raysgd.controller import frames
from raysgd.controller.checkpoints.pending import find_rounds
from raysgd.controller.frames import Frame
from raysgd.controller.journal.journal import Journal
from raysgd.controller.rounds import Reduce
from raysgd.controller.run.earlier import EarlierCheckpoints
from raysgd.controller.run_plan import AttemptRecord, PreviousState, build_previous_state
from raysgd.errors import CheckpointError

_FLUSH_S = 0.5


class RunFiles:
    """Writes in one thread: storage sees commits, rounds of checkpoints and deletions in the order of their decisions.

    Args:
        storage: The run's folder.
        secrets: Texts that must not stand in its files.
        warn: Called with problems that do not end the run.
        retry: How failed writes of checkpoints are repeated.
        links: Keeps the names ``last`` and ``best``; None: there are none.
        earlier: Checkpoints of earlier runs that count with those of this run; None: there are none.
    """

    def __init__(
        self,
        storage: Storage,
        secrets: frozenset[str],
        warn: Callable[[str], None],
        retry: Retry | None = None,
        links: CheckpointLinks | None = None,
        earlier: EarlierCheckpoints | None = None,
    ) -> None:
        self.storage = storage
        checkpoints = storage.child("checkpoints")
        self.store = CheckpointStore(checkpoints if retry is None else checkpoints.with_retry(retry))
        self.journal = Journal(storage, secrets)
        self._warn = warn
        self._links = links
        self._earlier = earlier
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="raysgd-commit")
        self._flusher: asyncio.Task[None] | None = None
        self._deleting: set[asyncio.Task[None]] = set()
        self._journal_error: OSError | None = None
        self._is_journal_broken = False  # the newest flush has failed
        self._is_closed = False

    def uri_of(self, number: int) -> str:
        """Return the URI of a checkpoint's folder."""
        return self.store.directory(number).uri

    def previous(self, reduce: Reduce, last: AttemptRecord | None = None) -> PreviousState:
        """Reopen the files of a run that an earlier controller process began; returns the run's state. Blocks.

        Args:
            reduce: How metrics of a checkpoint are made from those of all ranks.
            last: The last attempt, which the journal may not contain.
        """
        frames_so_far, last_seq = self.journal.reopen()
        numbers = self.store.numbers()
        manifests = self._find_rounds(self.store.list(needs_newest=True), frames_so_far, last_seq, reduce)
        return build_previous_state(frames_so_far, last_seq, manifests, max(numbers, default=0)).up_to(last)

    def _find_rounds(
        self, manifests: list[Manifest], others: list[Frame], last_seq: int, reduce: Reduce
    ) -> list[Manifest]:
        """Complete the checkpoints whose round is in the journal alone. ``others``: all frames except reports."""
        awaiting = {manifest.number for manifest in manifests if manifest.awaits_round}
        saving = [each.seq for each in others if each.kind == frames.SAVING and each.data["number"] in awaiting]
        if not saving:
            return manifests
        reports = self.journal.frames_from(min(saving), last_seq + 1)
        known = find_rounds(manifests, heapq.merge(others, reports, key=lambda frame: frame.seq), reduce)
        for manifest in known:
            if manifest.number in awaiting and not manifest.awaits_round:
                with contextlib.suppress(CheckpointError):  # the journal still has it
                    self.store.write_round(manifest)
        return known

    def start(self) -> None:
        """Start to flush the journal regularly, and repair the links that a crash may have left behind."""
        self._flusher = asyncio.get_running_loop().create_task(self._flush_regularly())
        self._writer.submit(self.repair_links)

    def stop_flushing(self) -> None:
        """Stop the regular flushes; `flush` writes what is left."""
        if self._flusher is not None:
            self._flusher.cancel()

    async def commit(self, manifest: Manifest) -> None:
        """Write a checkpoint's manifest. Raises: as `write_round`."""
        await self._write(self.store.commit, manifest)
        await self._update_links(manifest)
        if self._earlier is not None:
            await self._in_writer(self._earlier.delete)  # what was needed when this run no longer wanted it

    async def write_round(self, manifest: Manifest) -> None:
        """Write the round of a checkpoint that was saved before it.

        Raises:
            Exception: It could not be written.
        """
        await self._write(self.store.write_round, manifest)
        await self._update_links(manifest)

    async def _write(self, write: Callable[[Any], Any], what: Any) -> None:
        """Change a checkpoint on storage, after the journal has what came before: the next controller knows what was done."""
        await self._flush(self._writer)  # also reports: a resumed run does not make them again
        await self._in_writer(write, what)

    def repair_links(self) -> None:
        """Make ``last`` and ``best`` lead where they should; reads the manifests of all runs."""
        if self._links is not None:
            self._change_links(self._links.repair)

    async def _update_links(self, manifest: Manifest) -> None:
        if self._links is not None:
            await self._in_writer(self._change_links, self._links.update, manifest)

    def delete(self, numbers: Iterable[int]) -> None:
        """Delete checkpoints, after the writes that were requested before."""
        for number in numbers:
            self._spawn(self._write(self.store.delete, number))

    def delete_earlier(self, numbers: Collection[int]) -> None:
        """Delete checkpoints of earlier runs, now or after a later commit."""
        assert self._earlier is not None
        self._spawn(self._write(self._earlier.delete, numbers))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._deleting.add(task)  # the loop holds tasks weakly
        task.add_done_callback(self._deleting.discard)

    async def sweep(self) -> None:
        """Delete the files of checkpoints that were never committed."""
        try:
            await self._in_writer(self.store.sweep_uncommitted)
        except Exception as error:  # the run itself is safe
            self._warn(f"parts of unfinished checkpoints are left in {self.store.storage.path_of('')}: {error}")

    async def write_run(self, description: dict[str, Any]) -> None:
        """Write ``run.json``."""
        await self._in_writer(self.journal.write_run, description)

    async def flush(self) -> None:
        """Write all frames so far to storage, after the writes that were requested before."""
        await self._flush(None if self._is_closed else self._writer)

    def describe_lost(self) -> str | None:
        """Return how much of the journal could not be written; None: the newest flush has written what there was then."""
        num_reports, num_others = self.journal.num_unwritten()
        if not self._is_journal_broken or (not num_reports and not num_others):
            return None
        return (
            f"{num_reports:,} of {self.journal.num_reports:,} reports and {num_others} events could not be written to "
            f"{self.storage.path_of('')}, and load_run will not have them: {self._journal_error}"
        )

    def flush_if_local(self) -> None:
        """Write all frames now, if that takes only a millisecond."""
        if not self.storage.is_local:
            return
        try:
            self.journal.flush()
            self._is_journal_broken = False
        except OSError as error:
            self._journal_broke(error)

    def _change_links(self, change: Callable[..., None], *args: Any) -> None:
        """Change the links; a failure must not cost a checkpoint."""
        try:
            change(*args)
        except (OSError, CheckpointError) as error:
            self._warn(f"last and best in {self.storage.parent().path_of('')} could not be changed: {error}")
            self._links = None

    def close(self) -> None:
        """Stop the writing thread. A later `flush` writes from another one."""
        self._is_closed = True
        self._writer.shutdown(wait=False)

    async def _flush_regularly(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            await self._flush(None)

    async def _flush(self, executor: ThreadPoolExecutor | None) -> None:
        """Flush the journal. A journal that cannot be written must not end a run, nor keep its readers waiting."""
        try:
            await asyncio.get_running_loop().run_in_executor(executor, self.journal.flush)
            self._is_journal_broken = False
        except OSError as error:
            self._journal_broke(error)

    def _journal_broke(self, error: OSError) -> None:
        is_first, self._journal_error = self._journal_error is None, error
        self._is_journal_broken = True
        if is_first:
            self._warn(f"the run's files cannot be written, which is tried again: {error}")

    async def _in_writer(self, function: Callable[..., Any], *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, function, *args)


def new_run_folder(runs: Storage) -> Storage:
    """Make the next free ``run_NNN`` in a Trainer's folder; a run's folder is never used twice."""
    runs.make_dirs()
    newest = int(taken[-1][4:]) if (taken := run_names(runs)) else 0
    folder = runs.child(f"run_{newest + 1:03d}")
    folder.make_dirs()
    return folder
