"""The numbers that `doc/protocol.md` and the guides promise, written out: the page, the code and these agree.

Tests of behaviour are next to what they test, and write the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from raysgd.backends.horovod import HorovodConfig
from raysgd.backends.jax import JaxConfig
from raysgd.backends.torch import TorchConfig
from raysgd.checkpoint.storage import storage
from raysgd.config import FailureConfig
from raysgd.controller import gcs_watch
from raysgd.controller.checkpoints import memory_copies
from raysgd.controller.policies import after_failure, growth, hang, mismatch
from raysgd.controller.processes import hosting
from raysgd.controller.run import run_files, worker_watch
from raysgd.controller.state_machine import run_machine
from raysgd.session import saving
from raysgd.workers.group import group, joining
from raysgd.workers.placement import avoided_nodes
from support.project import ROOT

#: By the first cell of a row of the table of timeouts: the second cell, what must agree with it, and the number.
TIMEOUTS: dict[str, tuple[str, Callable[[], Any], Any]] = {
    "gathering of errors": ("0.05", lambda: run_machine.GATHER_S, 0.05),
    "deaths together": ("0.2", lambda: group._DIE_TOGETHER_S, 0.2),
    "report of a wait": ("2", lambda: group.WAIT_REPORT_S, 2),
    "`abort_grace_s`": ("2", lambda: FailureConfig().abort_grace_s, 2),
    "fetching from memory": (
        "3, and 1 for each 50 MB",
        lambda: (memory_copies.REACH_S, memory_copies.REACH_BYTES_PER_S),
        (3, 50e6),
    ),
    "probation of a lost node": ("5", lambda: avoided_nodes.PROBATION_S, 5),
    "report of an outage": ("10", lambda: gcs_watch.AWAY_S, 10),
    "explanation": ("5", lambda: run_machine.EXPLAIN_S, 5),
    "`heartbeat_timeout_s`": ("10", lambda: FailureConfig().heartbeat_timeout_s, 10),
    "`init_timeout_s` (torch)": ("10", lambda: TorchConfig().init_timeout_s, 10),
    "`timeout_s` (Horovod)": ("10", lambda: HorovodConfig().timeout_s, 10),
    "copying to memory": ("10", lambda: saving.TAKE_S, 10),
    "`preemption_grace_s`": ("25", lambda: FailureConfig().preemption_grace_s, 25),
    "`stop_grace_s`": ("30", lambda: FailureConfig().stop_grace_s, 30),
    "`init_timeout_s` (JAX)": ("30", lambda: JaxConfig().init_timeout_s, 30),
    "`mismatch_timeout_s`": ("60", lambda: FailureConfig().mismatch_timeout_s, 60),
    "`timeout_s` (JAX)": ("100", lambda: JaxConfig().timeout_s, 100),
    "`start_timeout_s`": ("120", lambda: FailureConfig().start_timeout_s, 120),
    "`callback_timeout_s`": ("300", lambda: FailureConfig().callback_timeout_s, 300),
    "`wait_for_nodes_s`": ("0", lambda: FailureConfig().wait_for_nodes_s, 0),
    "`progress_timeout_s`": ("none", lambda: FailureConfig().progress_timeout_s, None),
    "`timeout_s` (torch)": ("1800", lambda: TorchConfig().timeout_s, 1800),
}

#: Sentences of the pages, what must agree with them, and the number.
SENTENCES: list[tuple[str, str, Callable[[], Any], Any]] = [
    ("doc/protocol.md", "at least 30 s from a savepoint", lambda: run_machine.SAVE_POINT_GRACE_S, 30),
    ("doc/protocol.md", "retried after a pause of 0.2 to 5 s", lambda: after_failure.RESTART_DELAY_S, 0.2),
    ("doc/protocol.md", "retried after a pause of 0.2 to 5 s", lambda: after_failure.MAX_RESTART_DELAY_S, 5),
    ("doc/protocol.md", "| 30 s: a warning; `mismatch_timeout_s` |", lambda: mismatch.WARN_AFTER_S, 30),
    (
        "doc/protocol.md",
        "the third save waits, which is not a hang; a warning after 10 s",
        lambda: saving.LONG_WAIT_S,
        10,
    ),
    (
        "doc/protocol.md",
        "ten times the run's longest pause, at least 60",
        lambda: (hang.AUTO_FACTOR, hang.AUTO_MIN_S),
        (10, 60),
    ),
    ("doc/protocol.md", "started again, up to 3 times in a run", lambda: hosting.MAX_RESTARTS, 3),
    ("doc/protocol.md", "a warning after 30 s says what they do", lambda: hosting.NOTICE_S, 30),
    ("doc/protocol.md", "4 times in `heartbeat_timeout_s`", lambda: worker_watch._ASKS, 4),
    ("doc/protocol.md", "| SIGTERM to a worker; draining node | at once; 2 s |", lambda: worker_watch.DRAIN_POLL_S, 2),
    ("doc/protocol.md", "| more workers can be started | 2 s |", lambda: joining.SEARCH_INTERVAL_S, 2),
    ("doc/protocol.md", "The journal is written twice a second", lambda: run_files._FLUSH_S, 0.5),
    ("doc/guides/elastic.md", "Two growths are at least 10 s apart", lambda: growth.MIN_PAUSE_S, 10),
    (
        "doc/guides/elastic.md",
        "lost within a minute, up to 5 minutes",
        lambda: (growth.FLAP_S, growth.MAX_PAUSE_S),
        (60, 300),
    ),
]


def rows_of_timeouts() -> dict[str, str]:
    """Return the first two cells of the table of timeouts."""
    section = (ROOT / "doc/protocol.md").read_text().partition("\n## Timeouts\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in section.splitlines() if line.startswith("| ")]
    return {what: number for what, number in rows if what != "what" and not what.startswith("---")}


def test_every_timeout_of_the_page_is_written_out_here() -> None:
    assert rows_of_timeouts() == {what: text for what, (text, _, _) in TIMEOUTS.items()}


@pytest.mark.parametrize("what", TIMEOUTS)
def test_timeout_is_what_the_page_says(what: str) -> None:
    _, read, number = TIMEOUTS[what]
    assert read() == number


@pytest.mark.parametrize(("page", "sentence", "read", "number"), SENTENCES, ids=[each[1] for each in SENTENCES])
def test_sentence_of_a_page_is_true(page: str, sentence: str, read: Callable[[], Any], number: Any) -> None:
    assert sentence in re.sub(r"\s+", " ", (ROOT / page).read_text())
    assert read() == number


def test_storage_is_retried_for_a_minute_where_the_run_would_end_otherwise() -> None:
    waited: list[float] = []
    retry = storage.Retry(storage.retry_of_writes("raise").tries, waited.append)

    def refuse() -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(Exception, match="tried"):
        retry.run("write", "x", refuse)
    assert 60 <= sum(waited) <= 70 and max(waited) == 5
