"""Loggers of a declarative training: callbacks of raysgd for the known ones, and own classes that rank 0 calls."""

from __future__ import annotations

from typing import Any

from raysgd.callbacks.base import Callback
from raysgd.callbacks.tensorboard import TensorBoardCallback
from raysgd.callbacks.wandb import WandbCallback
from raysgd.config.argument_names import check_known
from raysgd.declarative.args import FieldError, LogConfig, TrainerArgs
from raysgd.declarative.reading import as_values
from raysgd.declarative.values import Importer
from raysgd.errors import ConfigError

_KNOWN = ("TensorBoardLogger", "WandbLogger")


def make_callbacks(args: TrainerArgs, importer: Importer) -> tuple[list[Callback], list[str]]:
    """Make the callbacks of the known loggers and of own callbacks; and what the user should know of them. Driver side.

    Raises:
        ConfigError: A logger does not exist or does not take its arguments.
    """
    callbacks: list[Callback] = []
    warnings: list[str] = []
    for place, log in enumerate(args.log):
        name = _short_name(log)
        try:
            if name == "TensorBoardLogger":
                check_known(name, log.args, ("name", "root_dir"), {})
                if log.args.get("root_dir") is not None:
                    warnings.append("TensorBoardLogger: the files are written to the run's folder, not to root_dir.")
                callbacks.append(TensorBoardCallback(subdir=str(log.args.get("name") or "tensorboard")))
            elif name == "WandbLogger":
                check_known(name, log.args, ("name", "project", "entity", "dir", "mode"), {})
                callbacks.append(WandbCallback(**{key: value for key, value in log.args.items() if value is not None}))
            elif isinstance(kind := importer.load(str(log.type)), type) and issubclass(kind, Callback):
                callbacks.append(importer.build(str(log.type), log.args))
            elif not callable(getattr(kind, "log_metrics", None)) and isinstance(kind, type):
                raise ConfigError(
                    f"{log.type} is neither a raysgd.Callback nor a class with a method log_metrics(metrics, step, tag=...)."
                )
        except ConfigError as error:
            raise FieldError(("log", str(place)), str(error)) from None
    return callbacks, warnings


def make_own_loggers(args: TrainerArgs, importer: Importer) -> list[Any]:
    """Make the loggers that are neither known nor callbacks, and set them up. On rank 0."""
    made = []
    for log in args.log:
        if _short_name(log) in _KNOWN:
            continue
        kind = importer.load(str(log.type))
        if isinstance(kind, type) and issubclass(kind, Callback):
            continue
        logger = importer.build(str(log.type), log.args)
        if callable(setup := getattr(logger, "setup", None)):
            setup(as_values(args))
        made.append(logger)
    return made


def _short_name(log: LogConfig) -> str | None:
    """Return the name of a known logger, whatever module it is said to be in."""
    name = str(log.type).rpartition(".")[2]
    return name if name in _KNOWN and ("." not in str(log.type) or str(log.type).startswith("nnscaler.")) else None
