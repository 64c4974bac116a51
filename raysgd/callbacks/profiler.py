"""Record traces of some training steps by the torch profiler. Runs in each worker, in its training thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd._util.imports import import_optional
from raysgd.callbacks.base import Callback
from raysgd.callbacks.folder import Folder, below, open_folder
from raysgd.config.checks import check_count
from raysgd.result import Result, RunInfo


class TorchProfilerCallback(Callback):
    """Writes Chrome traces to ``{run_dir}/profiler/rank_{rank}/``, for https://ui.perfetto.dev or TensorBoard.

    A step is the time between two reports. A cycle waits for ``wait`` steps, warms up for ``warmup``, records ``active``
    and writes one trace, named by its number, attempt and last iteration. There are ``repeat`` cycles, after
    ``skip_first`` steps. If the run ends while a cycle records, the incomplete trace is written. Steps that are not recorded
    cost next to nothing. Each run, and each attempt after a failure, starts from the first cycle.

    Args:
        skip_first: Steps before the first cycle.
        wait: Steps at the start of a cycle that are not recorded.
        warmup: Steps after these in which the profiler runs without keeping its data.
        active: Recorded steps of a cycle.
        repeat: Number of cycles; 0: until the run ends.
        ranks: World ranks that are traced.
        with_stack: Record Python stacks, at a cost.
        record_shapes: Record the shapes of operators' inputs.
        profile_memory: Record allocations.

    Attributes:
        traces: Paths or URIs of this run's traces, in the worker.
    """

    runs_in = "worker"

    traces: list[str]
    _profiler: Any
    _folder: Folder | None
    _run_folder: str
    _iteration: int
    _attempt: int

    def __init__(
        self,
        skip_first: int = 0,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        *,
        ranks: Sequence[int] = (0,),
        with_stack: bool = False,
        record_shapes: bool = False,
        profile_memory: bool = False,
    ) -> None:
        counts = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        for name, value in counts.items():
            check_count(f"TorchProfilerCallback({name})", value, minimum=int(name == "active"))
        self._schedule = counts
        self._ranks = tuple(check_count("TorchProfilerCallback(ranks)", rank, minimum=0) for rank in ranks)
        self._options = {"with_stack": with_stack, "record_shapes": record_shapes, "profile_memory": profile_memory}
        self._clear()

    def on_run_start(self, info: RunInfo) -> None:
        self._clear()
        rank = self.rank or 0
        if rank not in self._ranks:
            return
        profiler = import_optional("torch.profiler", "torch")
        self._run_folder = below(info.run_dir, "profiler", f"rank_{rank}")
        self._folder = open_folder(self._run_folder)
        self._profiler = profiler.profile(
            schedule=profiler.schedule(**self._schedule), on_trace_ready=self._write, **self._options
        )
        self._profiler.start()

    def on_result(self, result: Result) -> None:
        self._iteration = result.get("training_iteration", self._iteration + 1)
        self._attempt = result.get("attempt", 1)
        if self._profiler is not None:
            self._profiler.step()

    def on_run_end(self, error: BaseException | None) -> None:
        profiler, self._profiler = self._profiler, None
        folder = self._folder
        if profiler is not None:
            profiler.stop()  # writes a trace if it is recording
        self._folder = None
        if folder is not None:
            folder.close()

    def _clear(self) -> None:
        self.traces = []
        self._profiler = None
        self._folder = None
        self._run_folder = ""
        self._iteration = 0
        self._attempt = 1

    def _write(self, profiler: Any) -> None:
        if self._folder is None:
            return
        name = f"trace_{len(self.traces) + 1:03d}_attempt_{self._attempt}_iteration_{self._iteration:06d}.pt.trace.json"
        path = self._folder.path / name
        profiler.export_chrome_trace(str(path))
        self.traces.append(below(self._run_folder, name))
        self._folder.sync(force=True)
