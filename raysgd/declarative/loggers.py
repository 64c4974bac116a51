"""Loggers of a declarative training: callbacks of raysgd for the known ones, and own classes that rank 0 calls."""

from __future__ import annotations

from typing import Any

from raysgd.callbacks.base import Callback
from raysgd.declarative.args import TrainerArgs, as_values
from raysgd.declarative.fields import of_field
from raysgd.declarative.values import Importer
from raysgd.errors import ConfigError


def make_callbacks(args: TrainerArgs, importer: Importer) -> tuple[list[Callback], list[str]]:
    """Make the callbacks of the known loggers and of own callbacks; and what the user should know of them. Driver side.

    Raises:
        ConfigError: A logger does not exist or does not take its arguments.
    """
    callbacks: list[Callback] = []
    warnings: list[str] = []
    for place, log in enumerate(args.log):
        if log.known_logger is not None:
            if "root_dir" in log.args:
                warnings.append("TensorBoardLogger: the files are written to the run's folder, not to root_dir.")
            callbacks.append(log.make_known())
            continue
        with of_field("log", str(place)):
            if isinstance(kind := importer.load(log.type), type) and issubclass(kind, Callback):
                callbacks.append(importer.build(log.type, log.args))
            elif not callable(getattr(kind, "log_metrics", None)) and isinstance(kind, type):
                raise ConfigError(
                    f"{log.type} is neither a raysgd.Callback nor a class with a method log_metrics(metrics, step, tag=...)."
                )
    return callbacks, warnings


def make_own_loggers(args: TrainerArgs, importer: Importer) -> list[Any]:
    """Make the loggers that are neither known nor callbacks, and set them up. On rank 0."""
    made = []
    for log in args.log:
        if log.known_logger is not None:
            continue
        kind = importer.load(log.type)
        if isinstance(kind, type) and issubclass(kind, Callback):
            continue
        logger = importer.build(log.type, log.args)
        if callable(setup := getattr(logger, "setup", None)):
            setup(as_values(args))
        made.append(logger)
    return made
