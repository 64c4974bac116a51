"""``examples/06_tune_digits.py`` and ``examples/07_cross_validation.py``: real searches on the digits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.examples import run_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_search_finds_what_learns_and_stops_what_does_not(tmp_path: Path) -> None:
    told = run_example("06_tune_digits.py", "--trials", "5", "--epochs", "6", folder=tmp_path)
    trials = re.findall(r"^lr \S+, width +\d+: accuracy (\S+) after (\d+) epochs$", told, re.MULTILINE)
    assert len(trials) == 5, told
    assert all(2 <= int(epochs) <= 6 for _, epochs in trials)
    (best,) = re.findall(r"^best: accuracy (\S+), lr", told, re.MULTILINE)
    assert float(best) == max(float(accuracy) for accuracy, _ in trials) >= 0.93


def test_folds_give_a_mean_and_a_spread(tmp_path: Path) -> None:
    told = run_example("07_cross_validation.py", "--folds", "3", folder=tmp_path)
    trials = re.findall(r"^weight decay (\S+) *: accuracy (\S+) \+- (\S+) over 3 folds$", told, re.MULTILINE)
    assert [decay for decay, _, _ in trials] == ["0.0", "0.1", "3.0"], told
    assert max(float(accuracy) for _, accuracy, _ in trials) >= 0.93
    assert all(0 < float(spread) < 0.1 for _, _, spread in trials)
    assert re.search(r"^best: weight decay 0", told, re.MULTILINE)
