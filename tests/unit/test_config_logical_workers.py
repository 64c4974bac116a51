"""Settings of a Trainer with which logical workers cannot train to the same bits are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raysgd.errors import ConfigError
from raysgd.trainer.spec import make_spec

GIVEN: dict[str, Any] = {"num_workers": (1, 8), "deterministic": True, "logical_workers": 8}


def test_up_to_as_many_workers_as_logical_ones() -> None:
    assert make_spec(**GIVEN).logical_workers == 8
    assert make_spec(**{**GIVEN, "num_workers": 3}).logical_workers == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deterministic": False}, "give deterministic=True too"),
        ({"num_workers": 9}, "at most 8 workers"),
        ({"num_workers": (1, math.inf)}, "num_workers=inf"),
        ({"logical_workers": 0}, "logical_workers"),
        ({"logical_workers": 2.5}, "logical_workers"),
        ({"num_workers": 4, "workers_per_replica": 2}, "exclude each other"),
        ({"backend": "tensorflow"}, "backend='tensorflow'"),
        ({"backend": "none"}, "backend='torch'"),
    ],
)
def test_others_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_spec(**{**GIVEN, **changes})
