"""What can be done with a Trainer's workers beside runs: instances of a class, and functions called on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd._util.console import tell
from raysgd.errors import ConfigError, TrainerBusyError, TrainerClosedError
from raysgd.trainer import assembly
from raysgd.trainer.channel import Channel
from raysgd.trainer.control import RunControl
from raysgd.trainer.given import check_call
from raysgd.workers.pickling import loads


class ClassControl(RunControl):
    """The part of a `raysgd.Trainer` that has its workers up, with a class on them or without."""

    _class_name: str | None
    _is_closed: bool

    def start(self, ExecutionClass: type | None = None, *args: Any, **kwargs: Any) -> None:
        """Bring the workers up; with a class, form a process group and make an instance on each worker.

        The instances live until the next `start` or `shutdown`; `run` needs workers without them.

        Raises:
            Exception: What the class's constructor raised.
            InfeasibleError: The cluster can never hold the workers.
        """
        self._check_free(class_api=True)
        if ExecutionClass is not None and not isinstance(ExecutionClass, type):
            raise ConfigError(f"start({ExecutionClass!r}) got no class; give a class and its arguments.")
        channel = self._connect()
        channel.call("drop_class")
        blob = assembly.share_call((ExecutionClass, args, kwargs), "the class and its arguments")
        self._class_name = None
        channel.call("start_class", blob, ExecutionClass is not None, may_repeat=False)
        self._class_name = None if ExecutionClass is None else ExecutionClass.__name__

    def execute(self, fn: Callable[..., Any]) -> list[Any]:
        """Call ``fn(instance)`` on every worker (``fn()`` where no class was given); results by rank.

        Raises:
            Exception: What ``fn`` raised, as its own type; its ``__cause__`` has the worker's traceback and rank.
        """
        return self._execute("execute", fn, first_only=False)

    def execute_single(self, fn: Callable[..., Any]) -> Any:
        """Call ``fn`` on rank 0 alone."""
        return self._execute("execute_single", fn, first_only=True)[0]

    # -- inside ---------------------------------------------------------------------------------------------------

    def _connect(self) -> Channel:
        if self._channel is None or self._channel.is_gone:
            assembly.connect_ray()
            if self._spec.run.detached and assembly.owns_cluster():
                tell(
                    "this program has started the Ray cluster, which ends with it, and so will the run: see `ray start`"
                )
            self._channel = Channel.start(assembly.make_settings(self._spec))
            self._class_name = None
        return self._channel

    def _check_open(self) -> None:
        if self._is_closed:
            raise TrainerClosedError("this Trainer was shut down; make a new one.")

    def _check_free(self, *, class_api: bool = False) -> None:
        self._check_open()
        if self._is_live:
            folder = ((self._stream and self._stream.run_dir) or "").partition("?")[0].rstrip("/").rpartition("/")[2]
            raise TrainerBusyError(f"{folder or 'a run'} is running; wait for it with get_returns(), or cancel() it.")
        if self._class_name is not None and not class_api:
            raise TrainerBusyError(f"instances of {self._class_name} are live; start() without a class drops them.")

    def _execute(self, method: str, fn: Callable[..., Any], *, first_only: bool) -> list[Any]:
        self._check_free(class_api=True)
        has_class = self._class_name is not None
        check_call(method, fn, has_instance=has_class)
        channel = self._connect()
        blob = assembly.share_call(fn, "the function")
        return [loads(value) for value in channel.call("execute", blob, first_only, has_class, may_repeat=False)]
