"""Which processes may work together: the wire format changes with whatever is sent, and messages say what to install."""

from __future__ import annotations

import sys
from collections import namedtuple
from dataclasses import make_dataclass
from typing import Any

import pytest

from raysgd.controller.kv_store import SENT
from raysgd.workers import versions
from raysgd.workers.orders import WorkerTask
from raysgd.workers.process.worker_actor import WorkerActor
from raysgd.workers.versions import VersionCheck, own_versions, why_refused, wire_format

DRIVER = {"wire": "aaaa", "raysgd": "1.2.0", "python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0"}


def find_records(*kinds: type) -> list[Any]:
    """Return the records in the wire format of classes."""
    found: dict[Any, None] = {}
    modules = [kind.__module__ for kind in kinds]
    for module in modules:
        for record in versions._list_records(vars(sys.modules[module]).values()):
            found[record] = None
            if record.__module__ not in modules:
                modules.append(record.__module__)
    return list(found)


RECORDS = find_records(WorkerActor)


def test_wire_format_knows_what_workers_are_sent_and_send() -> None:
    names = {record.__name__ for record in RECORDS}
    assert {"WorkerTask", "AttemptOrder", "Member", "DatasetPlan", "InboxAddress", "Endpoint", "RunInfo"} <= names
    assert {"Reports", "Saved", "PartSafe", "Returned", "Failed", "FileEntry", "Heartbeat", "WorkerInfo"} <= names
    assert {"TrainerSettings", "RunRequest", "Frame", "WorkerTask"} <= {one.__name__ for one in find_records(*SENT)}


@pytest.mark.parametrize(
    ("record", "change"),
    [
        pytest.param(record, change, id=f"{record.__name__}, {change}")
        for record in RECORDS
        for change in ("renamed", "another field", "without its first field", "another type")
        if change != "another type" or not hasattr(record, "_fields")  # a named tuple travels without types
    ],
)
def test_wire_format_changes_with_each_record(record: Any, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = versions.wire_format.__wrapped__(WorkerActor)
    is_tuple = hasattr(record, "_fields")
    fields = {field.partition(": ")[0]: field.partition(": ")[2] for field in versions._list_fields(record)}
    first = next(iter(fields), "")
    if change == "another type":
        fields[first or "first"] = "complex"
    elif change == "another field":
        fields["new"] = "int"
    elif change == "without its first field":
        fields.pop(first, None) or fields.update(first="int")
    name = "Renamed" if change == "renamed" else record.__name__
    other: Any = namedtuple(name, fields) if is_tuple else make_dataclass(name, fields.items())
    other.__module__ = record.__module__
    for module in [module for name, module in sys.modules.items() if name.startswith("raysgd.")]:
        for attribute, value in list(vars(module).items()):
            if value is record:
                monkeypatch.setattr(module, attribute, other)
    assert versions.wire_format.__wrapped__(WorkerActor) != before


def test_wire_format_changes_with_the_calls_of_workers() -> None:
    def like_workers(**others: Any) -> str:
        methods = {name: value for name, value in vars(WorkerActor).items() if callable(value)}
        return wire_format(type("Other", (), {**methods, **others, "__module__": WorkerActor.__module__}))

    same = wire_format(WorkerActor)
    assert like_workers() == same
    assert like_workers(_private=lambda self: None) == same, "others do not call it"
    assert like_workers(reach=lambda self, parts: True) != same
    assert like_workers(added=lambda self: None) != same


def test_versions_of_this_process_import_no_framework() -> None:
    found = own_versions(WorkerTask)
    assert {"wire", "raysgd", "python", "ray"} <= found.keys()
    assert all(type(value) is str for value in found.values()), "another version of raysgd must be able to read them"


def refusal(**theirs: str) -> str | None:
    return why_refused(DRIVER, {**DRIVER, **theirs}, "the workers on node-2 (10.0.0.2)")


def test_other_wire_format_is_refused_with_both_versions_and_what_to_install() -> None:
    assert refusal(wire="bbbb", raysgd="1.1.0") == (
        "raysgd 1.1.0 of the workers on node-2 (10.0.0.2) cannot work with raysgd 1.2.0 of the driver, because their wire "
        "formats differ (bbbb and aaaa); install raysgd 1.2.0 there"
    )


def test_other_build_of_the_same_version_is_refused_too() -> None:
    assert "install the driver's build of raysgd 1.2.0 there" in str(refusal(wire="bbbb"))


def test_other_minor_version_of_python_is_refused() -> None:
    assert refusal(python="3.12.1", wire="bbbb") == (
        "Python 3.12.1 of the workers on node-2 (10.0.0.2) cannot work with Python 3.11.7 of the driver; install Python 3.11 "
        "there"
    )


@pytest.mark.parametrize("name", ["raysgd", "ray", "torch"])
def test_other_version_with_the_same_wire_format_is_a_warning_for_each_node_once(name: str) -> None:
    check = VersionCheck(own_versions(WorkerActor), WorkerActor)
    theirs = {**own_versions(WorkerActor), name: "9.9"}
    for number in range(5):
        assert check.judge(theirs, f"node-{number}") is None
        assert check.judge(theirs, f"node-{number}") is None
    (warning,) = check.take_warnings()
    assert warning.startswith(f"{name} 9.9 of the workers on node-0, node-1, node-2 and 2 more differs from {name} ")
    check.judge(theirs, "node-0")
    assert check.take_warnings() == []
    check.judge(theirs, "node-5")
    assert "on node-5 differs" in check.take_warnings()[0]


def test_package_that_only_one_side_has_is_no_difference() -> None:
    check = VersionCheck({**own_versions(WorkerActor), "here": "1"}, WorkerActor)
    assert check.judge({**own_versions(WorkerActor), "there": "1"}, "node-1") is None
    assert check.take_warnings() == []
