"""The version is kept in one place."""

from __future__ import annotations

from importlib.metadata import version

from raysgd._version import __version__
from support.project import files, name_of


def test_the_installed_version_is_the_one_in_the_code() -> None:
    assert version("raysgd") == __version__


def test_the_version_is_written_once() -> None:
    written = [name_of(path) for path in files(".py", ".toml", ".yml") if __version__ in path.read_text("utf-8")]
    assert written == ["raysgd/_version.py"]
