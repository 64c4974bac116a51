"""What ``raysgd run`` makes of its flags, where it resumes, and which exit status an error has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import pytest

import raysgd
from raysgd.cli.main import main
from raysgd.cli.run import command, make_order, report, trainer_arguments
from raysgd.cli.script import ScriptExit
from raysgd.declarative.values import ComponentError
from raysgd.errors import (
    CheckpointNotFoundError,
    ConfigError,
    UsageError,
    WorkerDiedError,
    WorkerTraceback,
)


def given(*words: str) -> dict[str, Any]:
    with command.make_context("run", list(words)) as ctx:
        return command.given(ctx)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("raise RuntimeError('it must not run')\n")
    return str(tmp_path / "train.py")


def test_without_flags_the_trainer_has_its_defaults() -> None:
    made, default = raysgd.Trainer(**trainer_arguments({})), raysgd.Trainer(runtime_env=None)
    assert made._spec == default._spec


def test_flags_are_arguments_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL_HAS", "it")
    arguments = trainer_arguments(
        given(
            *("--num-workers", "2:inf", "--cpus-per-worker", "0.5", "--gpus-per-worker", "1", "--backend", "none"),
            *("--env", "A=b=c", "--env", "SHELL_HAS", "--seed", "3", "--name", "exp", "--storage-path", "/runs"),
            *("--address", "auto", "--max-failures", "7", "--num-to-keep", "2", "--detached", "--grace", "5"),
        )
    )
    assert arguments == {
        "num_workers": (2, math.inf),
        "backend": "none",
        "cpus_per_worker": 0.5,
        "gpus_per_worker": 1,
        "workers_per_replica": 1,
        "runtime_env": {"env_vars": {"A": "b=c", "SHELL_HAS": "it"}},
        "seed": 3,
        "run_config": raysgd.RunConfig(name="exp", storage_path="/runs", detached=True, ray_address="auto"),
        "failure_config": raysgd.FailureConfig(max_failures=7, stop_grace_s=5),
        "checkpoint_config": raysgd.CheckpointConfig(num_to_keep=2),
    }


def test_checkpoints_of_all_runs_count_where_the_last_of_them_is_resumed() -> None:
    words = ["--name", "exp", "--num-to-keep", "2", "--resume-from"]
    assert trainer_arguments(given(*words, "last"))["checkpoint_config"].scope == "folder"
    assert trainer_arguments(given(*words, "runs/exp/run_001"))["checkpoint_config"].scope == "run"


def test_shared_models_are_known_to_the_trainer() -> None:
    words = ["--engine.tensor-parallel", "2", "--engine.pipeline-parallel", "3"]
    assert trainer_arguments(given(*words, "script.py"))["workers_per_replica"] == 6


def test_restarts_include_exceptions() -> None:
    arguments = trainer_arguments(given("--max-restarts", "2", "--backend", "env", "--name", "exp"))
    assert arguments["failure_config"] == raysgd.FailureConfig(max_failures=2, retry_on=Exception)
    assert arguments["backend"] == raysgd.EnvConfig(max_restarts=2, run_id="exp")
    assert trainer_arguments(given("--backend", "env"))["backend"] == raysgd.EnvConfig(max_restarts=3)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--num-workers", "0"], "'--num-workers': 0: num_workers=0 is too small"),
        (["--num-workers", "two"], "'--num-workers': 'two' is not a valid integer."),
        (["--num-workers", "8:2"], "has its minimum above its maximum"),
        (["--num-workers", "2:"], "'--num-workers': '' is not a valid integer."),
        (["--env", "NOT_SET_ANYWHERE"], "the variable is not set here; give NAME=VALUE."),
        (["--reduce", "loss"], "'--reduce': loss: give NAME=VALUE."),
        (["--reduce", "loss=avg"], "loss='avg' is not known; give one of"),
        (["--progress", "bar"], "progress='bar' is not known; give one of 'auto', 'live', 'lines', 'off'"),
        (["--nproc_per_node", "2"], "give the number of all workers as --num-workers"),
        (["--rdzv-endpoint=here:1"], "raysgd chooses where the workers meet"),
        (["--num_workers", "2"], "--num_workers is not known (did you mean '--num-workers'?)"),
        (["--mixed-precision", "bf16"], "give --engine.precision bf16"),
    ],
)
def test_unusable_flag_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        given(*words)
    assert text in caught.value.format_message()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--max-failures", "1", "--max-restarts", "1"], "set the same limit"),
        (["--resume-from", "last"], "--resume-from last needs --name"),
        (["--working-dir", "missing"], "--working-dir missing: there is no such folder."),
        (["--working-dir", str(Path(__file__).parent)], "does not contain the script"),
        (["--engine.zero-stage", "9"], "zero_stage=9"),
        (["--engine.tensor-parallel", "2"], "--num-workers: 1 workers do not hold whole replicas of the model"),
        (["--engine.tensor-parallel", "2", "--num-workers", "2:3"], "give 4 in place of 3."),
        (["--engine.precison", "bf16"], "did you mean '--engine.precision'?"),
    ],
)
def test_flags_that_do_not_fit_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], script: str, words: list[str], text: str
) -> None:
    assert main(["run", *words, script]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "there is no script: raysgd run [FLAGS] SCRIPT.py"),
        (["missing.py"], "the script missing.py cannot be read: No such file"),
    ],
)
def test_script_must_exist(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert main(["run", *words]) == 2
    assert text in capsys.readouterr().err


def test_folder_that_ray_copies_has_the_script(tmp_path: Path, script: str) -> None:
    order = make_order({"--working-dir": str(tmp_path.parent)}, script, ["--lr", "1"])
    assert order.script._shipped_path == f"{tmp_path.name}/train.py"


def test_module_takes_the_words_that_follow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vision").mkdir()
    (tmp_path / "vision" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for flag in ("-m", "--module"):
        words = ["--num-workers", "2", flag, "vision.train", "--seed", "1", "-m", "x"]
        with command.make_context("run", list(words)) as ctx:
            order = make_order(command.given(ctx), ctx.params["words"][0], ctx.params["words"][1:])
        assert order.given == {"--num-workers": 2}
        assert order.script._arguments == ("--seed", "1", "-m", "x")
        assert command.merge(words, ["--num-workers", "3"]) == ["--num-workers", "3", *words[2:]]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-m"], "-m needs the name of a module: raysgd run -m PACKAGE.MODULE"),
        (["-m", "vision.trian"], "-m vision.trian: there is no such module in"),
        (["-m", "vision/train.py"], "-m vision/train.py is not the name of a module; give one such as package.train"),
        (["-m", "vision"], "-m vision is a package without __main__.py; give one of its modules: vision.NAME"),
    ],
)
def test_module_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    (tmp_path / "vision").mkdir()
    (tmp_path / "vision" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words]) == 2
    assert text in capsys.readouterr().err


def test_script_that_is_not_python_ends_with_its_syntax_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("if True\n")
    assert main(["run", str(tmp_path / "train.py")]) == 1
    shown = capsys.readouterr().err
    assert f'File "{tmp_path / "train.py"}", line 1' in shown and "SyntaxError" in shown
    assert "raysgd" not in shown.replace(str(tmp_path), ""), "frames of the command are shown"


# -- the end -----------------------------------------------------------------------------------------------------------


def of_worker(error: Exception) -> Exception:
    error.__cause__ = WorkerTraceback("Traceback ...\nValueError: bad", 3, "host (10.0.0.1)", ((0, "lost a peer"),))
    return error


@pytest.mark.parametrize(
    ("error", "status", "texts"),
    [
        (
            of_worker(ValueError("bad")),
            1,
            ["the script failed in the worker of rank 3 on host (10.0.0.1)", "ValueError: bad", "rank 0: lost a peer"],
        ),
        (of_worker(ConfigError("of the script")), 1, ["the script failed in the worker of rank 3"]),
        (of_worker(ScriptExit(7)), 7, ["rank 3 on host (10.0.0.1) called sys.exit(7)"]),
        (WorkerDiedError("rank 1 died"), 1, ["WorkerDiedError: rank 1 died"]),
        (KeyError("a bug"), 1, ["KeyError: 'a bug'"]),
    ],
)
def test_error_has_its_status(
    capsys: pytest.CaptureFixture[str], error: Exception, status: int, texts: list[str]
) -> None:
    assert report(error) == status
    shown = capsys.readouterr().err
    assert [text for text in texts if text not in shown] == []


def test_component_of_a_training_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = ComponentError("model: my.Net: my has no 'Net'.")
    assert report(of_worker(error), "raysgd train", "training") == 1
    assert capsys.readouterr().err == "raysgd train: model: my.Net: my has no 'Net'.\n"


@pytest.mark.parametrize(
    "error",
    [UsageError("the Ray cluster cannot be reached"), CheckpointNotFoundError("no checkpoint"), ConfigError("no")],
)
def test_what_a_flag_names_must_be_there(error: Exception) -> None:
    with pytest.raises(ConfigError, match=str(error)):
        report(error)
