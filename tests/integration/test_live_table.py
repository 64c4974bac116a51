"""The live table on a real terminal: it is shown by default, and its last state shows the whole run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from support.project import ROOT

SCRIPT = """
import time

import ray

import raysgd


def train_func(config):
    for step in range(12):
        raysgd.save_checkpoint({"step": step})
        raysgd.report(step=step, loss=1 / (step + 1))
        time.sleep(0.1)


ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
with raysgd.Trainer(2, "none", run_config=raysgd.RunConfig(storage_path="runs", name="shown")) as trainer:
    trainer.run(train_func)
    print("workers:", *trainer.execute(__import__("os").getpid))
"""


def on_a_terminal(command: list[str], folder: Path, rows: int = 40, columns: int = 120) -> tuple[int, str]:
    """Return what a program shows on a terminal of this size, and its exit status."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=its, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # Linux raises this when the other end is closed
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
    os.close(ours)
    return process.wait(timeout=60), shown.decode(errors="replace")


def test_terminal_shows_the_live_table_by_default(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    status, shown = on_a_terminal([sys.executable, "train.py"], tmp_path)
    assert status == 0, shown
    assert shown.count("\x1b[1A") > 10, "nothing was drawn over"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "")
    last, _, after = text.rpartition("workers:")
    pids = after.split()[:2]
    # The last drawing stays on the screen, with the last report on it.
    table = last[[found.start() for found in re.finditer(r"run_001(?!/)", last)][-1] :]  # nor is that of a path
    assert "finished" in table
    assert re.search(r"^│ +step +11 +0 +11 +[▁▂▃▄▅▆▇█]+", table, re.MULTILINE)
    assert re.search(r"^│ +loss +0\.083\d* ", table, re.MULTILINE)
    for rank, pid in enumerate(pids):
        assert re.search(rf"^│ +{rank} +\S+.* {pid} ", table, re.MULTILINE)
    assert "[run_001] " not in text, "lines, as a file gets them"
