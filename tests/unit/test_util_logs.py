"""Messages go to the logger ``raysgd``: printed by default, and wherever the application sends them if it configures logging."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOG = "from raysgd._util.logs import get_logger; get_logger().info('a message'); get_logger().debug('a detail'); "


def stderr_of(before: str = "", after: str = "") -> list[str]:
    code = f"import logging, sys\n{before}\n{LOG}\n{after}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_messages_are_printed_once_by_default() -> None:
    assert stderr_of() == ["[raysgd] a message"]
    assert stderr_of(after=LOG) == ["[raysgd] a message"] * 2


@pytest.mark.parametrize(
    ("configuration", "printed"),
    [
        ("logging.getLogger('raysgd').setLevel(logging.ERROR)", []),
        ("logging.getLogger('raysgd').setLevel(logging.DEBUG)", ["[raysgd] a message", "[raysgd] a detail"]),
        ("logging.getLogger('raysgd').addHandler(logging.NullHandler())", []),
        ("logging.getLogger('raysgd').addHandler(logging.StreamHandler())", ["a message"]),
        ("logging.basicConfig(format='%(name)s: %(message)s')", ["raysgd: a message"]),
    ],
)
def test_an_application_configures_messages_as_those_of_any_library(configuration: str, printed: list[str]) -> None:
    assert stderr_of(configuration) == printed


def test_a_handler_that_is_added_later_replaces_the_default_one() -> None:
    later = "handler = logging.StreamHandler(); logging.getLogger('raysgd').addHandler(handler)\n" + LOG
    assert stderr_of(after=later) == ["[raysgd] a message", "a message"]
