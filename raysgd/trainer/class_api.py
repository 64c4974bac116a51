"""The class API of a Trainer: instances of a user's class on the workers, and functions called on them. Driver side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd.errors import ConfigError, TrainerBusyError
from raysgd.trainer import assembly
from raysgd.trainer.arguments import check_call, check_constructor
from raysgd.trainer.channel import Channel
from raysgd.trainer.run_manager import RunManager
from raysgd.workers.pickling import loads


class ClassApi:
    """The instances that `raysgd.Trainer.start` makes.

    Args:
        runs: The runs of the same Trainer, which use the same workers.
    """

    def __init__(self, runs: RunManager) -> None:
        self._runs = runs
        self._class_name = ""
        self._channel: Channel | None = None  # of the TrainerActor that has the instances

    def start(self, execution_class: type | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._runs.check_idle()
        if execution_class is not None and not isinstance(execution_class, type):
            raise ConfigError(f"start({execution_class!r}) did not get a class; give a class and its arguments.")
        if execution_class is not None:
            check_constructor(execution_class, args, kwargs)
        channel = self._runs.connect()
        channel.call("drop_class")
        self._channel = None
        blob = assembly.share_call(
            (execution_class, tuple(args), dict(kwargs)), "the class and its arguments", self._runs.spec
        )
        channel.call("start_class", blob, execution_class is not None, may_repeat=False)
        if execution_class is not None:
            self._class_name, self._channel = execution_class.__name__, channel

    def execute(self, method: str, function: Callable[..., Any], *, first_only: bool) -> list[Any]:
        self._runs.check_idle()
        has_instances = self._channel is not None  # also if their TrainerActor died: the next one raises an error then
        check_call(method, function, has_instance=has_instances)
        channel = self._runs.connect()
        blob = assembly.share_call(function, "the function", self._runs.spec)
        values = channel.call("execute", blob, first_only, has_instances, may_repeat=False)
        return [loads(value) for value in values]

    def check_no_instances(self) -> None:
        """Check that no instances are live, since a run needs workers without them.

        Raises:
            TrainerBusyError: Instances are live.
        """
        if self._has_instances:
            raise TrainerBusyError(
                f"instances of {self._class_name} are live on the workers; start() without a class drops them."
            )

    @property
    def _has_instances(self) -> bool:
        channel = self._channel
        return channel is not None and channel is self._runs.latest.channel and not channel.is_gone
