"""Work in a notebook, in a real kernel: cells that are executed again, changed modules, exceptions, how a run is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.project import ROOT

pytestmark = pytest.mark.timeout(240)

HEAD = """
%load_ext autoreload
%autoreload 2
import os, sys, time
sys.path.insert(0, os.getcwd())
import ray, raysgd
ray.init(address="local", num_cpus=2, include_dashboard=False)
"""

TRAIN = """
def train_func(config):
    for step in range(3):
        raysgd.report(loss=1 / (step + 1))
    return os.getpid()

trainer = raysgd.Trainer(2, "none", run_config=raysgd.RunConfig(storage_path="runs"))
began = time.monotonic()
print("pids", trainer.run(train_func, {}, returns="all"))
print("took", time.monotonic() - began)
"""

FAILS = """
def train_func(config):
    label = config["label"]
    raise ValueError(f"label {label} of ten classes")

trainer.run(train_func, {"label": 10})
"""

LOOP_THAT_IS_LEFT = """
def train_func(config):
    while True:
        raysgd.report(loss=0.5)
        time.sleep(0.01)

for result in trainer.run_generator(train_func):
    if result["training_iteration"] == 3:
        raise KeyboardInterrupt
"""

RESTART = """
ray.shutdown()
ray.init(address="local", num_cpus=2, include_dashboard=False)
"""


class Notebook:
    """A kernel that executes cells."""

    def __init__(self, folder: Path) -> None:
        import nbformat
        from nbclient import NotebookClient

        self._cells: list[Any] = []
        self._new = nbformat.v4.new_code_cell
        content = nbformat.v4.new_notebook(cells=self._cells)
        self._client = NotebookClient(
            content, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": folder}}
        )

    def __enter__(self) -> Notebook:
        self._context = self._client.setup_kernel()
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def execute(self, code: str) -> list[Any]:
        """Return the outputs of a new cell."""
        cell = self._new(code.strip())
        self._client.nb.cells.append(cell)
        self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        return list(cell.outputs)

    def printed(self, code: str) -> str:
        """Return what a new cell prints; fail if it raises."""
        outputs = self.execute(code)
        assert not [output for output in outputs if output.output_type == "error"], outputs
        return "".join(output.get("text", "") for output in outputs)

    def raised(self, code: str) -> Any:
        (error,) = [output for output in self.execute(code) if output.output_type == "error"]
        return error


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, _no_process_is_left: None) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        with Notebook(folder) as notebook:
            notebook.printed(HEAD)
            notebook.printed(TRAIN)
            yield notebook
            notebook.printed("trainer.shutdown()\nray.shutdown()")
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def pids(printed: str) -> str:
    (found,) = re.findall(r"pids (\[.*\])", printed)
    return str(found)


def plain(lines: list[str]) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines))


def test_cell_that_makes_a_trainer_can_be_executed_again(notebook: Notebook) -> None:
    """The Trainer of the first time gives its CPUs back when its name is rebound, although it was shown."""
    first = notebook.printed(TRAIN)
    again = notebook.printed(TRAIN)
    assert pids(first) != pids(again)


def test_exception_of_train_func_shows_frames_of_the_user_only(notebook: Notebook) -> None:
    error = notebook.raised(FAILS)
    text = plain(error.traceback)
    assert error.ename == "ValueError" and error.evalue == "label 10 of ten classes"
    assert 'raise ValueError(f"label {label} of ten classes")' in text
    assert 'trainer.run(train_func, {"label": 10})' in text
    assert text.index("in train_func") < text.index("trainer.run(")
    assert str(ROOT / "raysgd") not in text
    for code in ("trainer.run(train_func, 7)", "trainer.run(lambda: raysgd.report(0.5))"):
        refused = notebook.raised(code)
        assert refused.ename in ("ConfigError", "MetricError")
        assert code in plain(refused.traceback) and str(ROOT / "raysgd") not in plain(refused.traceback)


def test_trainer_is_released_although_the_notebook_keeps_the_last_exception(notebook: Notebook) -> None:
    notebook.raised(FAILS)
    printed = notebook.printed(TRAIN)
    assert pids(printed)
    notebook.raised(LOOP_THAT_IS_LEFT)
    assert pids(notebook.printed(TRAIN))


def test_changed_module_is_used_by_the_next_run(notebook: Notebook) -> None:
    change = "open('mine.py', 'w').write('''{}''')"
    notebook.printed(change.format("def train_func(config):\n    return 'before'\n"))
    assert notebook.printed("import mine\nprint(trainer.run(mine.train_func))").count("before") == 1
    notebook.printed(change.format("def train_func(config):\n    return 'after it was changed'\n"))
    assert notebook.printed("print(trainer.run(mine.train_func))").count("after it was changed") == 1


def test_run_is_shown_as_a_summary_with_curves(notebook: Notebook) -> None:
    notebook.printed(TRAIN)
    (shown,) = [
        o.data for o in notebook.execute("raysgd.load_run(trainer.run_dir)") if o.output_type == "execute_result"
    ]
    assert shown["text/plain"].startswith("run_001: done, 3 iterations in ")
    summary, _, page = shown["text/html"].partition("<iframe")
    assert re.search(r"loss .*[▁▂▃▄▅▆▇█]{3}", summary) and page


def test_trainer_that_is_an_output_is_named_as_the_holder(notebook: Notebook) -> None:
    """``Out`` refers to what a cell showed, so such a Trainer stays."""
    notebook.printed("trainer.shutdown()\nshown = raysgd.Trainer(1, 'none')\nassert shown.run(os.getpid)")
    notebook.execute("shown")
    printed = notebook.printed(
        "shown = None\ntrainer = raysgd.Trainer(2, 'none', failure_config=raysgd.FailureConfig(start_timeout_s=6))\n"
        "try:\n    trainer.run(os.getpid)\nexcept raysgd.errors.StartTimeoutError as error:\n    print(error)"
    )
    assert re.search(r"1 is held by your Trainer of run getpid_\S+/run_001 \(its shutdown\(\) releases them\)", printed)
    notebook.printed("for each in Out.values():\n    isinstance(each, raysgd.Trainer) and each.shutdown()")
    assert pids(notebook.printed(TRAIN))


def test_trainer_works_after_ray_is_started_again(notebook: Notebook) -> None:
    notebook.printed(TRAIN)
    notebook.printed(RESTART)
    error = notebook.raised("trainer.run(train_func)")
    assert error.ename == "TrainerClosedError" and "the Ray cluster of this Trainer is gone" in error.evalue
    assert pids(notebook.printed(TRAIN))
