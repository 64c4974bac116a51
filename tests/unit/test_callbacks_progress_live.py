"""The live table on a real pseudo-terminal, and in the kernel of a real notebook."""

from __future__ import annotations

import logging
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks import ProgressCallback
from raysgd.testing.callback_suite import drive

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

DRIVER = """
import logging, sys, threading, time
from pathlib import Path
from raysgd.callbacks import ProgressCallback
from raysgd.callbacks.runner import CallbackRunner
from raysgd.result import Event
from raysgd.testing.callback_suite import make_info, make_result

logging.getLogger("ray").addHandler(logging.StreamHandler())  # holds the real stderr, as Ray's own does
runner = CallbackRunner([ProgressCallback(refresh_hz=10)], print)
out, err = sys.stdout, sys.stderr
started = threading.Event()

def play(results, pause_s, error=None, then=lambda: None):
    runner.start(make_info(Path("digits")))
    for iteration in range(1, results + 1):
        runner.call("on_result", make_result(iteration))
        started.set()
        time.sleep(pause_s)
    then()
    runner.end(error)
    assert (sys.stdout, sys.stderr) == (out, err)
"""


class Screen:
    """What a program wrote to its terminal."""

    def __init__(self, raw: str) -> None:
        self.raw = raw

    @property
    def lines(self) -> list[str]:
        return [ESCAPES.sub("", line).rstrip() for line in re.split(r"[\r\n]+", self.raw)]

    @property
    def num_drawings(self) -> int:
        return sum("raysgd digits" in line for line in self.lines)

    @property
    def cursor_is_shown(self) -> bool:
        switches = re.findall(r"\x1b\[\?25([hl])", self.raw)
        return not switches or switches[-1] == "h"


def on_a_terminal(code: str, *, kill_after: str | None = None) -> Screen:
    """Run the driver's code on a pseudo-terminal; ``kill_after``: SIGKILL it when it has written this."""
    process_id, terminal = pty.fork()
    if process_id == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="100", LINES="30")
        os.execv(sys.executable, [sys.executable, "-c", DRIVER + code])
    raw = b""
    try:
        while chunk := _read(terminal):
            raw += chunk
            if kill_after is not None and kill_after.encode() in raw:
                os.kill(process_id, signal.SIGKILL)
                kill_after = None
    finally:
        os.close(terminal)
        os.waitpid(process_id, 0)
    return Screen(raw.decode())


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux raises this when the other side is closed
        return b""


def test_the_table_is_drawn_live_and_its_last_state_stays() -> None:
    screen = on_a_terminal("play(20, 0.05, ValueError('loss is nan'))")
    assert screen.num_drawings >= 3
    last = screen.lines[-12:]
    assert any("failed" in line and "iteration 20" in line for line in last)
    assert any("ValueError: loss is nan" in line for line in last)
    assert screen.cursor_is_shown


def test_prints_and_log_records_are_separate_lines() -> None:
    screen = on_a_terminal(
        """
def chatter():
    started.wait()  # a line that is half printed when the display begins would share it with the table
    for number in range(10):
        print("printed", number)
        logging.getLogger("ray").warning("logged %d", number)
        time.sleep(0.05)
thread = threading.Thread(target=chatter)
thread.start()
play(20, 0.05, then=thread.join)
"""
    )
    for number in range(10):
        assert screen.lines.count(f"printed {number}") == 1
        assert screen.lines.count(f"logged {number}") == 1


def test_a_last_line_without_an_end_is_not_lost() -> None:
    screen = on_a_terminal(
        """
runner.start(make_info(Path("digits")))
print("no line end", end="")
runner.end(None)
"""
    )
    assert "no line end" in screen.lines


def test_many_results_are_not_drawn_more_often() -> None:
    screen = on_a_terminal(
        """
runner.start(make_info(Path("digits")))
begin, cpu, stored = time.monotonic(), time.thread_time(), 0
while time.monotonic() < begin + 1.5:
    stored += 1
    runner.call("on_result", make_result(stored))
runner.end(None)
print("stored", stored, time.monotonic() - begin, time.thread_time() - cpu)
"""
    )
    (found,) = [line.split()[1:] for line in screen.lines if line.startswith("stored")]
    stored, elapsed_s, cpu_s = int(found[0]), float(found[1]), float(found[2])
    assert screen.num_drawings <= elapsed_s * 10 + 5
    assert stored > cpu_s * 5_000  # of 60,000
    assert any(f"iteration {stored:,}" in line for line in screen.lines)


def test_interrupted_driver_leaves_a_usable_terminal() -> None:
    screen = on_a_terminal(
        """
threading.Thread(target=play, args=(1000, 0.05), daemon=True).start()
started.wait()
time.sleep(0.3)
raise KeyboardInterrupt
"""
    )
    assert "KeyboardInterrupt" in screen.lines
    assert screen.lines[-2].startswith("╰")  # the table is closed, and the prompt goes below it
    assert screen.cursor_is_shown


def test_killed_driver_leaves_a_usable_terminal() -> None:
    screen = on_a_terminal("play(1000, 0.05)", kill_after="iteration")
    assert screen.num_drawings >= 1
    assert screen.cursor_is_shown


def test_stderr_that_goes_to_a_file_is_not_redirected(tmp_path: Path) -> None:
    log = tmp_path / "log"
    screen = on_a_terminal(
        f"""
sys.stderr = err = open({str(log)!r}, "w", buffering=1)
threading.Timer(0.2, lambda: print("to stderr", file=sys.stderr)).start()
play(10, 0.05)
"""
    )
    assert log.read_text() == "to stderr\n"
    assert "to stderr" not in screen.raw


def test_streams_and_log_handlers_are_restored(tmp_path: Path) -> None:
    handler = logging.StreamHandler()
    logger = logging.getLogger("of.a.test")
    logger.addHandler(handler)
    assert logging.lastResort is not None
    logger.addHandler(logging.lastResort)  # as some libraries do; it has no stream of its own
    before = (sys.stdout, sys.stderr, handler.stream)
    try:
        drive(ProgressCallback(mode="live"), tmp_path, error=ValueError("x"))
        assert (sys.stdout, sys.stderr, handler.stream) == before
    finally:
        logger.removeHandler(handler)
        logger.removeHandler(logging.lastResort)


def test_error_in_drawing_does_not_end_the_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raysgd.callbacks.progress import state as progress_state

    def fail(self: Any) -> None:
        raise ZeroDivisionError("in the snapshot")

    monkeypatch.setattr(progress_state.ProgressState, "snapshot", fail)
    with open(tmp_path / "screen", "w+") as file:
        drive(ProgressCallback(mode="live", file=file), tmp_path)
        file.seek(0)
        assert "the progress display failed: ZeroDivisionError" in ESCAPES.sub("", file.read())


def test_a_notebook_shows_one_table_that_is_replaced(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cell = DRIVER + "print('before')\nplay(10, 0.1)\nprint('after')"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[0].outputs
    (table,) = [output for output in outputs if output.output_type == "display_data"]
    assert "iteration 10" in table["data"]["text/plain"]
    assert "finished" in table["data"]["text/html"]
    assert table["data"]["text/html"].startswith("<pre")
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert printed == "before\nafter\n"


def test_a_pipe_gets_lines() -> None:
    done = subprocess.run([sys.executable, "-c", DRIVER + "play(3, 0)"], capture_output=True, text=True, timeout=60)
    assert "[digits] iteration 3" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
