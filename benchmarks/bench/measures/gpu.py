"""Reports and saves in a loop of 10 ms steps on a GPU. Runs in a worker, or in a process without Ray."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from bench.measures.base import Measure

_STEP_S = 0.01
#: Steps that the host may be ahead of the GPU, as in a loop that looks at an older loss. Without a limit the host would wait
#: for room in CUDA's queue, at any call.
_AHEAD = 2
_NUM_TENSORS = 8


def _params_of_gpu_step(system: str, quick: bool) -> dict[str, Any]:
    if quick:
        return {"steps": 5, "pairs": 2, "state_mb": 32, "saves": 3, "after_save_s": 0.1}
    return {"steps": 50, "pairs": 20, "state_mb": 512, "saves": 5, "after_save_s": 4.0}


def run_gpu_step(system: Any, params: dict[str, Any]) -> dict[str, list[float]]:
    """Measure ``report`` and ``save_checkpoint`` around steps of 10 ms, in the process that trains.

    Blocks of steps with and without reports alternate; each pair of blocks gives a percentage. Every save begins when the GPU
    is idle, so its time is that of the copy and the work around it; the next one waits until its files are written.

    Args:
        system: ``"raysgd"``, or ``"pinned_copy"``: only copy the tensors into memory that was page-locked before.
        params: Sizes, and the ``device``.
    """
    if system == "pinned_copy":
        return {"stall_s": _copy_plainly(params)}
    return {**_report(params), **_save(params)}


class DeviceStep:
    """A function that queues work on a device; for a GPU about 10 ms of it.

    Attributes:
        loss: A scalar on the device.
    """

    def __init__(self, device: str) -> None:
        import torch

        self.is_gpu = device != "cpu"
        size, dtype = (4096, torch.bfloat16) if self.is_gpu else (192, torch.float32)
        self._mm = torch.mm
        self._a = torch.rand(size, size, device=device, dtype=dtype)
        self._out = torch.empty_like(self._a)
        self.loss = self._out[0, 0]
        self._count = 10
        self._under_way: deque[Any] = deque()
        for _ in range(4):  # the first rounds also bring the clocks up
            start = time.perf_counter()
            for _ in range(10):
                self._queue()
            self.wait()
            self._count = max(1, round(self._count * 10 * _STEP_S / (time.perf_counter() - start)))

    def __call__(self) -> None:
        self._queue()
        if not self.is_gpu:
            return
        import torch

        self._under_way.append(torch.cuda.Event(blocking=True))
        self._under_way[-1].record()
        if len(self._under_way) > _AHEAD:
            self._under_way.popleft().synchronize()

    def wait(self) -> None:
        """Wait until all queued work is done."""
        if self.is_gpu:
            import torch

            torch.cuda.synchronize()
        self._under_way.clear()

    def _queue(self) -> None:
        for _ in range(self._count):
            self._mm(self._a, self._a, out=self._out)


def _report(params: dict[str, Any]) -> dict[str, list[float]]:
    import raysgd

    step = DeviceStep(params["device"])
    calls: list[float] = []

    def block(reports: bool) -> float:
        start = time.perf_counter()
        for number in range(params["steps"]):
            step()
            if reports:
                called = time.perf_counter()
                raysgd.report(step=number, loss=step.loss)
                calls.append(time.perf_counter() - called)
        step.wait()
        return time.perf_counter() - start

    block(True)
    calls.clear()
    percents, steps = [], []
    for number in range(params["pairs"]):
        order = (False, True) if number % 2 == 0 else (True, False)
        took = {reports: block(reports) for reports in order}
        percents.append(100 * (took[True] / took[False] - 1))
        steps.append(took[False] / params["steps"])
    return {"report_s": calls, "percent": percents, "step_s": steps}


def _save(params: dict[str, Any]) -> dict[str, list[float]]:
    import raysgd

    step, state = DeviceStep(params["device"]), _make_state(params)
    stalls = []
    for number in range(params["saves"]):
        step()
        step.wait()
        start = time.perf_counter()
        raysgd.save_checkpoint({"step": number, **state})
        stalls.append(time.perf_counter() - start)
        written = start + params["after_save_s"]
        while time.perf_counter() < written:  # train on while the files are written
            step()
            raysgd.report(step=number, loss=step.loss)
        step.wait()
    return {"first_stall_s": stalls[:1], "stall_s": stalls[1:]}


def _copy_plainly(params: dict[str, Any]) -> list[float]:
    import torch

    state = _make_state(params)
    is_gpu = params["device"] != "cpu"
    targets = {name: torch.empty(value.shape, pin_memory=is_gpu) for name, value in state.items()}
    taken = []
    for _ in range(params["saves"]):
        start = time.perf_counter()
        for name, value in state.items():
            targets[name].copy_(value, non_blocking=True)
        if is_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return taken[1:]


def _make_state(params: dict[str, Any]) -> dict[str, Any]:
    import torch

    size = params["state_mb"] * 1_000_000 // 4 // _NUM_TENSORS
    return {f"w{number}": torch.rand(size, device=params["device"]) for number in range(_NUM_TENSORS)}


GPU_STEP = Measure(
    name="gpu_step",
    title="Reports and saves in a 10 ms CUDA step",
    systems=("pinned_copy", "raysgd"),
    units={"report_s": "s", "percent": "%", "step_s": "s", "first_stall_s": "s", "stall_s": "s"},
    params=_params_of_gpu_step,
    run=run_gpu_step,
)
