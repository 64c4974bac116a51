"""``examples/06_tune_digits.py`` and ``examples/07_cross_validation.py``: real searches on the digits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.examples import run_example

pytestmark = pytest.mark.timeout(300)


def test_search_stops_bad_trials_and_finds_a_good_one(tmp_path: Path) -> None:
    output = run_example("06_tune_digits.py", "--trials", "5", "--epochs", "6", folder=tmp_path)
    trials = re.findall(r"^lr \S+, width +\d+: accuracy (\S+) after (\d+) epochs$", output, re.MULTILINE)
    assert len(trials) == 5, output
    assert all(2 <= int(epochs) <= 6 for _, epochs in trials)
    (best,) = re.findall(r"^best: accuracy (\S+), lr", output, re.MULTILINE)
    assert float(best) == max(float(accuracy) for accuracy, _ in trials) >= 0.93


def test_folds_give_mean_and_standard_deviation(tmp_path: Path) -> None:
    output = run_example("07_cross_validation.py", "--folds", "3", folder=tmp_path)
    trials = re.findall(r"^weight decay (\S+) *: accuracy (\S+) \+- (\S+) over 3 folds$", output, re.MULTILINE)
    assert [decay for decay, _, _ in trials] == ["0.0", "0.1", "3.0"], output
    assert max(float(accuracy) for _, accuracy, _ in trials) >= 0.93
    assert all(0 < float(spread) < 0.1 for _, _, spread in trials)
    assert re.search(r"^best: weight decay 0", output, re.MULTILINE)
