"""Compares the versions of two processes, before they send each other more than built-in types. Runs in all processes.

The *wire format* is derived from the code, so that nobody has to remember to count it up: the names and fields of the records
(dataclasses and named tuples) that are sent, and the calls of the class that receives them. Processes whose wire formats
differ cannot work together.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any, get_args

import ray

from raysgd._version import __version__

#: The versions of a process, by what they are of: ``"wire"`` is the wire format, the others are names of packages.
Versions = Mapping[str, str]

#: Frameworks whose versions are compared where they are installed. None is imported for it.
_FRAMEWORKS = ("torch", "tensorflow", "jax")
#: Nodes that a message names; the others are counted.
_MAX_NAMED = 3


def decisive_versions(*kinds: type) -> dict[str, str]:
    """Return those versions of this process by which it may be refused, with the wire format of these classes."""
    return {"wire": wire_format(*kinds), "raysgd": __version__, "python": platform.python_version()}


@functools.cache
def own_versions(*kinds: type) -> Versions:
    """Return the versions of this process, with the wire format of these classes; see `wire_format`."""
    found = {**decisive_versions(*kinds), "ray": ray.__version__}
    for package in _FRAMEWORKS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@functools.cache
def wire_format(*kinds: type) -> str:
    """Return a checksum of the methods of classes, and of the records that their modules know, directly or through others."""
    modules = [kind.__module__ for kind in kinds]
    sent = set()
    for module in modules:  # grows meanwhile
        for kind in _list_records(vars(sys.modules[module]).values()):
            sent.add((kind.__module__, kind.__qualname__, *_list_fields(kind)))
            if kind.__module__ not in modules:
                modules.append(kind.__module__)
    calls = sorted(
        (name, method.__code__.co_varnames[: method.__code__.co_argcount])
        for kind in kinds
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType) and not name.startswith("_")
    )
    return f"{zlib.crc32(repr((calls, sorted(sent))).encode()):08x}"


def _list_records(values: Iterable[Any]) -> Iterator[Any]:
    for value in list(values):
        for kind in (value, *get_args(value)):  # a union names what a stream carries
            is_record = isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
            if is_record and kind.__module__.startswith("raysgd."):
                yield kind


def _list_fields(kind: Any) -> list[str]:
    if is_dataclass(kind):
        return [f"{field.name}: {field.type}" for field in fields(kind)]
    return list(kind._fields)  # a named tuple


def why_refused(driver: Versions, theirs: Versions, who: str) -> str | None:
    """Return why a process cannot work with the driver, and what to install; None if it can.

    Args:
        driver: The driver's versions.
        theirs: The other process's versions.
        who: The other process, for the message.
    """
    if _minor(theirs) != _minor(driver):
        return (
            f"Python {theirs.get('python')} of {who} cannot work with Python {driver['python']} of the driver; install Python "
            f"{_minor(driver)} there"
        )
    if theirs.get("wire") == driver["wire"]:
        return None
    own, other = driver["raysgd"], theirs.get("raysgd")
    wanted = f"raysgd {own}" if own != other else f"the driver's build of raysgd {own}"
    return (
        f"raysgd {other} of {who} cannot work with raysgd {own} of the driver, because their wire formats differ "
        f"({theirs.get('wire')} and {driver['wire']}); install {wanted} there"
    )


def _minor(versions: Versions) -> str:
    return ".".join(versions.get("python", "").split(".")[:2])


class VersionCheck:
    """Compares the versions of a Trainer's workers with the driver's. Runs in the TrainerActor.

    Args:
        driver: The driver's versions.
        worker: The class of worker actors: the wire format is that of this process, which understands the driver.
    """

    def __init__(self, driver: Versions, worker: type) -> None:
        self._driver = driver
        self._worker = worker
        self._known: set[tuple[str, str, str]] = set()
        self._new: dict[tuple[str, str], list[str]] = {}  # nodes, by what differs from the driver

    def judge(self, theirs: Versions, node: str) -> str | None:
        """Return why a worker of a node cannot work with the driver, or None; keep other differences for `take_warnings`."""
        needed = {**self._driver, "wire": wire_format(self._worker)}  # computed here, not in a cold start
        if (why := why_refused(needed, theirs, f"the workers on {node}")) is not None:
            return why
        for name, version in theirs.items():
            if needed.get(name, version) != version and (name, version, node) not in self._known:
                self._known.add((name, version, node))
                self._new.setdefault((name, version), []).append(node)
        return None

    def take_warnings(self) -> list[str]:
        """Return a line for each other difference, with its nodes; each node is named once."""
        new, self._new = self._new, {}
        return [
            f"{name} {version} of the workers on {_name_some(nodes)} differs from {name} {self._driver[name]} of the driver: "
            "install the same version on all nodes"
            for (name, version), nodes in new.items()
        ]


def _name_some(nodes: list[str]) -> str:
    named = ", ".join(nodes[:_MAX_NAMED])
    return named if len(nodes) <= _MAX_NAMED else f"{named} and {len(nodes) - _MAX_NAMED} more"
