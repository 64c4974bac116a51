"""How those who wait for resources are shown the Trainer that holds them."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.controller.holders import describe
from raysgd.controller.kv_store import Holder


@pytest.mark.parametrize(
    ("settings", "run", "text"),
    [
        ({}, "digits/run_001", "your Trainer of run digits/run_001 (its shutdown() releases them)"),
        ({}, None, "your Trainer without a run (its shutdown() releases them)"),
        (
            {"alias": "mine", "job_id": "02"},
            "mine/run_001",
            "the detached Trainer 'mine' of run mine/run_001 (Trainer.attach('mine').shutdown() ends it)",
        ),
        (
            {"placement_id": "ab"},
            "trial_1/run_001",
            "a Trainer of run trial_1/run_001 that was made in a placement group, such as a Tune trial",
        ),
        (
            {"job_id": "02"},
            "digits/run_003",
            "the Trainer of run digits/run_003 in another program (train.py, pid 7 on a)",
        ),
    ],
)
def test_holder_is_described_with_what_makes_it_release(settings: dict[str, Any], run: str | None, text: str) -> None:
    holder = Holder(**{"name": "n", "alias": None, "job_id": "01", "program": "train.py, pid 7 on a", **settings})
    assert describe(holder, run, "01") == text
