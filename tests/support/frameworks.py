"""Marks for tests that need packages that are not installed everywhere."""

from __future__ import annotations

import importlib.util

import pytest

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)
