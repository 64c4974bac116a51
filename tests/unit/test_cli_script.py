"""A script that runs as a train_func finds what ``python script.py`` would give it, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.cli.output import OutputProgress
from raysgd.cli.run import find_module
from raysgd.cli.script import OutputMark, Script, ScriptExit
from raysgd.engine.config import EngineConfig
from raysgd.errors import ConfigError
from raysgd.trainer.arguments import check_train_func

FACTS = """
import json, os, pickle, sys
import __main__


class Net:
    pass


facts = {
    "name": __name__,
    "file": __file__,
    "argv": sys.argv,
    "path": sys.path[0],
    "folder": os.getcwd(),
    "is_main": __main__.Net is Net,
    "pickles": isinstance(pickle.loads(pickle.dumps(Net())), Net),
}
with open(sys.argv[1], "w") as file:
    json.dump(facts, file)
"""


def script_in(folder: Path, source: str, /, *arguments: str, **settings: Any) -> Script:
    folder.mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text(source)
    return Script(str(path), source.encode(), arguments, **settings)


def surroundings() -> tuple[Any, ...]:
    return sys.modules["__main__"], list(sys.argv), list(sys.path), os.getcwd()


def test_script_runs_as_main_and_restores_its_surroundings(tmp_path: Path) -> None:
    before = surroundings()
    found = tmp_path / "facts.json"
    script = script_in(tmp_path / "code", FACTS, str(found), "--lr", "0.1", folder=str(tmp_path))
    pickle.loads(pickle.dumps(script))()
    path = str(tmp_path / "code" / "train.py")
    assert json.loads(found.read_text()) == {
        "name": "__main__",
        "file": path,
        "argv": [path, str(found), "--lr", "0.1"],
        "path": str(tmp_path / "code"),
        "folder": str(tmp_path),
        "is_main": True,
        "pickles": True,
    }
    assert surroundings() == before


def test_script_is_a_train_func_that_names_its_run(tmp_path: Path) -> None:
    script = script_in(tmp_path, "")
    assert check_train_func(script) is script
    assert script.__name__ == "train"


@pytest.mark.parametrize("is_other", [False, True])
def test_script_that_is_not_on_this_machine_runs_from_a_copy(tmp_path: Path, is_other: bool) -> None:
    """A file of another content at the same path is not the script."""
    found = tmp_path / "facts.json"
    script = script_in(tmp_path / "code", FACTS, str(found), folder=str(tmp_path / "missing"))
    path = tmp_path / "code" / "train.py"
    path.unlink()
    if is_other:
        path.write_text("raise RuntimeError('another script')")
    else:
        path.parent.rmdir()
    script()
    facts = json.loads(found.read_text())
    assert facts["file"].endswith("/train.py") and facts["file"] == facts["argv"][0] != str(path)
    assert facts["path"] == (str(path.parent) if is_other else os.path.dirname(facts["file"]))
    assert facts["folder"] == os.getcwd()
    assert not os.path.exists(facts["file"]), "the copy was left behind"


def test_traceback_shows_the_lines_of_a_copy(tmp_path: Path) -> None:
    script = script_in(tmp_path / "code", "def fail():\n    raise ValueError('bad')  # here\n\n\nfail()\n")
    (tmp_path / "code" / "train.py").unlink()
    with pytest.raises(ValueError, match="bad") as caught:
        script()
    shown = "".join(traceback.format_exception(caught.value))
    assert "in fail" in shown and "raise ValueError('bad')  # here" in shown


def test_script_in_a_folder_that_ray_copied_runs_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "facts.json"
    (tmp_path / "shipped" / "jobs").mkdir(parents=True)
    (tmp_path / "shipped" / "jobs" / "train.py").write_text(FACTS)
    monkeypatch.chdir(tmp_path / "shipped")
    script = script_in(
        tmp_path / "jobs", FACTS, str(found), folder=str(tmp_path), shipped_path=os.path.join("jobs", "train.py")
    )
    script()
    facts = json.loads(found.read_text())
    assert facts["file"] == str(tmp_path / "shipped" / "jobs" / "train.py")
    assert (facts["path"], facts["folder"]) == (str(tmp_path / "shipped" / "jobs"), str(tmp_path / "shipped"))


def test_modules_are_next_to_the_file_that_a_link_names(tmp_path: Path) -> None:
    found = tmp_path / "facts.json"
    script_in(tmp_path / "code", FACTS)
    (tmp_path / "link.py").symlink_to(tmp_path / "code" / "train.py")
    Script(str(tmp_path / "link.py"), FACTS.encode(), (str(found),))()
    facts = json.loads(found.read_text())
    assert (facts["file"], facts["path"]) == (str(tmp_path / "link.py"), str(tmp_path / "code"))


def test_script_imports_modules_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "module_of_this_test.py").write_text("VALUE = 3\n")
    script = script_in(tmp_path, "import module_of_this_test\nassert module_of_this_test.VALUE == 3\n")
    try:
        script()
    finally:
        sys.modules.pop("module_of_this_test", None)


@pytest.mark.parametrize("call", ["sys.exit()", "sys.exit(0)", "sys.exit(None)", "raise SystemExit"])
def test_exit_without_a_status_is_a_success(tmp_path: Path, call: str) -> None:
    script_in(tmp_path, f"import sys\n{call}\nraise ValueError('after the exit')\n")()


@pytest.mark.parametrize(
    ("argument", "status", "printed"), [("3", 3, ""), ("True", 1, ""), ("-1", 255, ""), ("'no data'", 1, "no data\n")]
)
def test_exit_with_a_status_is_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, status: int, printed: str
) -> None:
    before = surroundings()
    with pytest.raises(ScriptExit) as caught:
        script_in(tmp_path, f"import sys\nsys.exit({argument})\n")()
    assert pickle.loads(pickle.dumps(caught.value)).status == status
    assert capsys.readouterr().err == printed
    assert surroundings() == before


def test_source_that_is_not_python_is_found_without_running_it(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError) as caught:
        script_in(tmp_path, "print(1)\nif True\n").check()
    assert (caught.value.filename, caught.value.lineno) == (str(tmp_path / "train.py"), 2)


def test_source_has_the_encoding_that_it_declares(tmp_path: Path) -> None:
    source = "# -*- coding: latin-1 -*-\nassert len('é') == 1\n".encode("latin-1")
    (tmp_path / "train.py").write_bytes(source)
    Script(str(tmp_path / "train.py"), source)()


def test_script_reads_the_config_of_the_engine(tmp_path: Path) -> None:
    source = """
from raysgd.engine.config import EngineConfig, current_engine_config
assert current_engine_config() == EngineConfig(precision="bf16")
"""
    script_in(tmp_path, source, engine=EngineConfig(precision="bf16"))()
    with pytest.raises(AssertionError):
        script_in(tmp_path, source)()


def test_settings_that_no_engine_has_read_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = EngineConfig.of({"precision": "fp32", "zero_stage": 1})
    script_in(tmp_path, "from raysgd.engine.config import current_engine_config as read; read()", engine=settings)()
    assert capsys.readouterr().err == ""
    script_in(tmp_path, "", engine=settings)()
    assert "had no effect (precision, zero_stage): the script made no raysgd.Engine" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vision.train", "vision.tool"])
def test_module_of_a_package_runs_as_python_would_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    package = tmp_path / f"pkg_{tmp_path.name[-3:]}" / "vision"
    (package / "tool").mkdir(parents=True)
    (package / "__init__.py").write_text("imported = True\n")
    (package / "nets.py").write_text("size = 3\n")
    facts = "size, __name__, __package__, __spec__.name, sys.argv, sys.path[0], vision.imported"
    lines = f"import json, sys, vision\nfacts = [{facts}]\n"
    lines += "json.dump(facts, open(sys.argv[1], 'w'))\n"
    (package / "train.py").write_text(f"from .nets import size\n{lines}")
    (package / "tool" / "__main__.py").write_text(f"from ..nets import size\n{lines}")
    root = str(package.parent)
    monkeypatch.chdir(root)
    found = tmp_path / "facts.json"
    before = surroundings()
    module, path = find_module(name, root)
    script = Script(path, Path(path).read_bytes(), (str(found),), folder=root, module=module)
    assert script.__name__ == name.partition(".")[2]
    try:
        script()
    finally:
        for each in [each for each in sys.modules if each.partition(".")[0] == "vision"]:
            del sys.modules[each]
    assert surroundings() == before
    ours = json.loads(found.read_text())
    subprocess.run([sys.executable, "-m", name, str(found)], cwd=root, check=True, timeout=60)
    assert ours == json.loads(found.read_text())
    elsewhere = Script("/nowhere/vision/train.py", b"", module="vision.train")
    with pytest.raises(ConfigError, match=r"the module vision.train is not on this machine .* give --working-dir"):
        elsewhere()


@pytest.mark.parametrize("source", ["import os; os.chdir('/')", "import os; os.chdir('/'); raise KeyError"])
def test_script_that_changes_its_folder_leaves_the_worker_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    script = script_in(tmp_path, source, shipped_path="train.py")
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(KeyError):
        script()
    assert Path.cwd() == tmp_path


# -- marks in the output -----------------------------------------------------------------------------------------------

MARKS = st.builds(
    OutputMark, st.just("t0"), st.integers(1, 9), st.integers(0, 9), st.integers(1, 10), is_end=st.booleans()
)


@given(MARKS, st.text(st.characters(exclude_characters="\n"), max_size=20))
def test_mark_is_found_at_the_end_of_a_line(mark: OutputMark, text: str) -> None:
    assert OutputMark.parse(text + mark.line(), "t0") == (text, mark)
    assert OutputMark.parse(text, "t0") == (text, None)
    assert OutputMark.parse(mark.line(), "another") == (mark.line(), None)
    assert OutputMark.parse(mark.line()[:-1], "t0") == (mark.line()[:-1], None)


def test_output_is_complete_when_all_ranks_of_the_newest_attempt_have_ended() -> None:
    progress = OutputProgress("t0")

    def print_mark(attempt: int, rank: int, size: int, *, is_end: bool, is_err: bool) -> None:
        line = OutputMark("t0", attempt, rank, size, is_end).line()
        assert progress.filter(["before", line, "after" + line], is_err=is_err) == ["before", "after"]

    def end(attempt: int, rank: int, size: int) -> None:
        for is_err in (False, True):
            print_mark(attempt, rank, size, is_end=True, is_err=is_err)

    assert not progress.wait(0)
    end(1, 0, 2)
    print_mark(1, 1, 2, is_end=True, is_err=False)
    assert not progress.wait(0), "rank 1's errors are still to come"
    print_mark(1, 1, 2, is_end=True, is_err=True)
    assert progress.wait(0)
    print_mark(2, 0, 1, is_end=False, is_err=False)
    assert not progress.wait(0), "there is another attempt"
    end(1, 1, 2)
    assert not progress.wait(0), "a late line of the earlier attempt counts"
    end(2, 0, 1)
    assert progress.wait(0)
