"""``raysgd train``: what it prints and refuses without training."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raysgd.cli.main import main
from raysgd.declarative.args import as_values
from raysgd.declarative.checking import check_names, working_in
from raysgd.declarative.entry import _Job, check_sizes, split_folder
from raysgd.declarative.reading import args_of
from raysgd.errors import ConfigError
from support.project import ROOT

SMALL = {
    "model": {"type": "my.Model"},
    "optimizer": {"type": "torch.optim.SGD"},
    "dataset": {"type": "my.Data", "train_args": {"size": 3}},
    "max_epochs": 1,
}


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


def test_all_fields_and_defaults_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert list(printed)[:8] == [
        "init_module",
        "vars",
        "compute_config",
        "gen_savedir",
        "pas_policy",
        "run_mode",
        "tracing_from_weights",
        "model",
    ]
    assert printed["model"] == {"type": None, "args": {}}
    assert printed["checkpoint"]["save_dir"] == "./checkpoints"
    assert len(printed) == 31


def test_grace_is_a_setting_of_the_trainer(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-f", job, "--grace", "5", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["failure_config"] == {"stop_grace_s": 5.0}


def test_schema_fits_the_examples_and_refuses_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--schema"]) == 0
    check = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    check.check_schema(check.schema)
    files = [*(ROOT / "examples" / "declarative").glob("*.yaml")]
    assert files
    for file in files:
        assert list(check.iter_errors(yaml.safe_load(file.read_text()))) == [], file
    right: list[dict[str, Any]] = [
        {"model": "my.Model", "max_epochs": "$(max_train_steps)", "hook": {"on_epoch_end": "my.fn"}},
        {"compute_config": {"use_end2end": True, "runtime_ngpus": None}, "gen_reuse": "moo"},
        {"log": None, "dataloader": None, "trainer": None, "optimizer": {"type": "my.SGD", "args": None}},
        {"log": ["TensorBoardLogger"]},
        {"precision": {"param": "bf16"}, "engine": {"zero_stage": 1}, "search": {"space": {"max_epochs": [1, 2]}}},
    ]
    wrong: list[dict[str, Any]] = [
        {"max_epoch": 1}, {"max_epochs": "two"}, {"max_epochs": 0}, {"model": {"args": {}}}, {"engine": {"zero_stag": 1}},
        {"optimizer": {"type": "SGD"}}, {"checkpoint": {"save_type": "x"}}, {"precision": {"weight": "bf16"}}, {"log": 3},
    ]  # fmt: skip
    assert [each for each in right if not check.is_valid({**SMALL, **each})] == []
    assert [each for each in wrong if check.is_valid({**SMALL, **each})] == []


def test_help_lists_all_fields_with_what_they_may_be_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "--max_epochs N|none Epochs to train.",
        '--optimizer.grad_reduction mean|sum|row-mean|per-token-mean "mean" or "sum" over',
        "--checkpoint.save_last true|false Whether the newest checkpoint is always kept, and one is saved at the end of the "
        "training. (default: true)",
        "--engine.zero_stage N What each",
        "--search.mode min|max",
        "--model {...} The model. (needed)",
    ):
        assert part in text
    named = set(re.findall(r"--([a-z_.0-9]+)", text.partition("Fields of the file:")[2]))
    assert named >= set(_names(as_values(args_of(SMALL))))
    assert "use_end2end" not in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--help", "checkpoint"],
            ["--checkpoint {...} When checkpoints are saved.", "--checkpoint.save_dir TEXT Folder, or URI"],
        ),
        (["--help", "max_epochs"], ["--max_epochs N|none Epochs to train."]),
        (
            ["--model", "explained.Line", "--help", "model.args"],
            [
                "--model.args.width int Units of the layer. (needed)",
                "--model.args.names tuple[str, ...] | None (default: None)",
                "--model.args.options VALUE (further arguments)",
            ],
        ),
        (["--optimizer=explained.sgd", "--help", "optimizer.args"], ["--optimizer.args.lr float (default: 0.1)"]),
        (["-h", "dataset-sampler.train-args"], ["--dataset_sampler.train_args.shuffle bool"]),
    ],
)
def test_help_of_a_name_explains_the_field_or_lists_the_arguments_of_the_class(
    words: list[str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "explained.py").write_text(
        "from __future__ import annotations\n"
        'class Line:\n    """A line.\n\n    Args:\n        width (int): Units of the layer.\n    """\n\n'
        "    def __init__(self, width: int, names: tuple[str, ...] | None = None, **options): ...\n"
        "def sgd(params, lr: float = 0.1): ...\n"
    )
    assert main(["train", *words]) == 0
    sys.modules.pop("explained", None)
    text = " ".join(capsys.readouterr().out.split())
    assert [part for part in expected if part not in text] == []
    assert not {"--max_train_steps", "params", "num_replicas"} & set(re.findall(r"[\w.-]+", text))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--help", "checkpoint.resume"], "there is no such field (did you mean 'checkpoint.resume_from'?)"),
        (["--help", "model.args"], "the class is not known; give -f FILE or --model CLASS"),
        (["--model", "builtins.dict", "--help", "model.args"], "builtins.dict does not say which arguments it takes"),
        (["--model", "no_such.Line", "--help", "model.args"], "there is no module 'no_such'"),
    ],
)
def test_help_of_a_name_that_does_not_exist_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    assert text in capsys.readouterr().err


def _names(values: dict[str, Any], prefix: str = "") -> list[str]:
    inner = [
        _names(each, f"{prefix}{name}.")
        for name, each in values.items()
        if isinstance(each, dict) and "args" not in name
    ]
    return [*(prefix + name for name in values), *(name for each in inner for name in each)]


def test_a_file_is_printed_with_what_overrides_it(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-f", job, "--max_epochs", "3", "--model.args.dim=-1", "--json", "--print-config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["max_epochs"], printed["model"]["args"]) == (3, {"dim": "-1"})


def test_what_is_printed_is_a_file_again(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-f", job, "--print-config"]) == 0
    first = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(first)
    assert main(["train", "-f", str(tmp_path / "again.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "raysgd train: no file is given; give one with -f: raysgd train -f FILE."),
        (["job.yaml", "--max_epochs", "2"], "no file is given; give one with -f: raysgd train -f job.yaml."),
        (
            ["-f", "{job}", "--print-confg"],
            "--print-confg is neither a flag nor a field (did you mean '--print-config'?)",
        ),
        (["-f", "{job}", "--evalute=val"], "--evalute is neither a flag nor a field (did you mean '--evaluate'?)"),
        (["-f", "nothing.yaml"], "nothing.yaml cannot be read: No such file or directory."),
        (["-f", "{job}", "--max_epoch", "3"], "max_epoch: there is no such field (did you mean 'max_epochs'?)."),
        (["-f", "{job}", "junk"], "'junk' is neither a flag nor the value of one"),
        (["-f", "{job}", "--evaluate", "all"], "'all' is not one of 'val', 'test'"),
        (["-f"], "raysgd train: Option '-f' requires an argument; `raysgd train --help`"),
        (
            ["-f", "{job}", "--allow-import", "torch"],
            "model.type: my.Model may not be imported: --allow-import allows torch.",
        ),
        (["-f", "{job}", "--evaluate", "test"], "there is no data to evaluate: dataset.test_args is empty"),
        (
            ["-f", "{job}", "--checkpoint.save_dir", "/"],
            "checkpoint.save_dir: save_dir='/' is the root of the file system",
        ),
    ],
)
def test_a_mistake_has_status_2(job: str, words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *(word.format(job=job) for word in words)]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "workers", "each", "text"),
    [
        ({"micro_batch_size": 2, "global_batch_size": 8}, (1, 2), 1, None),
        (
            {"micro_batch_size": 2, "global_batch_size": 8},
            (1, 4),
            1,
            "3 workers cannot take 8 rows .* a multiple of 24",
        ),
        ({"micro_batch_size": 2, "global_batch_size": 8}, (4, 8), 2, "6 workers cannot take 8 rows"),
        ({"micro_batch_size": 2, "global_batch_size": 8}, 8, 2, None),
        ({"micro_batch_size": 2, "global_batch_size": 8}, 16, 1, "16 workers cannot take 8 rows"),
        ({"micro_batch_size": 1, "global_batch_size": 12}, (1, float("inf")), 1, "5 workers cannot take 12 rows"),
    ],
)
def test_every_size_of_an_elastic_group_takes_the_rows_of_a_step(
    changes: dict[str, Any], workers: Any, each: int, text: str | None
) -> None:
    args = args_of({**SMALL, **changes})
    if text is None:
        check_sizes(args, workers, each)
    else:
        with pytest.raises(ConfigError, match=text):
            check_sizes(args, workers, each)


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        ({"num_workers": "two"}, "num_workers='two' is a str"),
        ({"num_workers": [2]}, "has 1 entries; give"),
        ({"num_workers": None}, "num_workers=None is a NoneType"),
        ({"num_workers": [4, 2]}, "has its minimum above its maximum"),
        ({"failure_config": 3}, "trainer.failure_config=3 is not a mapping"),
        ({"checkpoint_config": 3}, "trainer.checkpoint_config=3 is not a mapping"),
        (
            {"checkpoint_config": {"links": True}},
            "trainer.checkpoint_config.links: links is set by the section checkpoint",
        ),
        ({"seed": 3}, "trainer.seed: trainer has no argument 'seed'"),
    ],
)
def test_arguments_of_the_trainer_that_cannot_work_are_refused(trainer: dict[str, Any], text: str) -> None:
    def make() -> None:
        job = _Job.of({**SMALL, "trainer": trainer}, None)
        job.make_trainer(job.decide())

    with pytest.raises(ConfigError, match=text):
        make()


def test_an_elastic_group_does_not_grow_beyond_the_rows_of_a_step() -> None:
    job = _Job.of(
        {**SMALL, "micro_batch_size": 2, "global_batch_size": 4, "trainer": {"num_workers": [1, float("inf")]}}, None
    )
    trainer = job.make_trainer(job.decide())
    assert trainer._spec.scaling.max_workers == 2


def test_folders_of_runs_may_be_on_object_storage() -> None:
    query = "?endpoint_override=http://host:9000"
    assert split_folder(f"s3://bucket/runs/job{query}") == (f"s3://bucket/runs{query}", "job")
    assert split_folder("s3://bucket/job/") == ("s3://bucket", "job")
    assert split_folder("/runs/job") == ("/runs", "job")
    for wrong in ("s3://bucket", "s3://", "/", "my runs"):
        with pytest.raises(ConfigError, match=r"checkpoint\.save_dir="):
            split_folder(wrong)


def test_a_class_that_its_module_does_not_have_is_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("raysgd.cli.train.run_to_end", None)
    (tmp_path / "parts.py").write_text("class Model: ...\n\n\ndef start(): ...\n")
    mistakes = {
        "model.type": {"model": {"type": "parts.Modle"}},
        "model.args.config.__type": {"model": {"type": "parts.Model", "args": {"config": {"__type": "parts.Modle"}}}},
        "optimizer.args.fn.value": {
            "optimizer": {"type": "parts.Model", "args": {"fn": {"__value_type": "function", "value": "parts.Modle"}}}
        },
        "hook.on_epoch_end": {"hook": {"on_epoch_end": "parts.Modle"}},
        "log.0.type": {"log": [{"type": "parts.Modle"}]},
        "init_env_fn": {"init_env_fn": "parts.Modle"},
    }
    for field, changes in mistakes.items():
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**SMALL, **changes}))
        assert main(["train", "-f", "job.yaml"]) == 2
        text = rf"job.yaml, line \d+, {re.escape(field)}: parts.Modle: parts has no 'Modle' \(did you mean 'Model'\?\)"
        assert re.search(text, capsys.readouterr().err)
        with pytest.raises(ConfigError, match=rf"^{re.escape(field)}: parts.Modle: parts has no"):
            _Job.of({**SMALL, **changes}, None)
    elsewhere = {"runtime_env": {"working_dir": "other"}}  # the workers have other modules
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**SMALL, **mistakes["model.type"], "trainer": elsewhere}))
    assert main(["train", "-f", "job.yaml", "--print-config"]) == 0
    assert "parts" not in sys.modules


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--allow-import", "torch"], r"job.yaml, line \d+, model.type: my.Model may not be imported"),
        (["--log+=noted.Plain"], r"command line \(--log\+=noted.Plain\), log.0: noted.Plain is neither"),
        (
            ["--pas_policy", "noted.choose"],
            r"command line \(--pas_policy[ =]noted.choose\), pas_policy: .* returned int",
        ),
    ],
)
def test_a_mistake_that_an_import_shows_has_its_place(
    words: list[str],
    text: str,
    job: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noted.py").write_text("class Plain: ...\n\n\ndef choose(config):\n    return 3\n")
    assert main(["train", "-f", job, *words]) == 2
    sys.modules.pop("noted", None)
    assert re.search(text, capsys.readouterr().err)


def test_a_module_with_another_name_is_named_when_the_values_are_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noted.py").touch()
    assert main(["train", "-f", job, "--print-config", "--model.type", "noteds.Line"]) == 0
    assert "there is no module 'noteds' in the working directory" in caplog.text
    assert "(did you mean 'noted'?); the training fails" in caplog.text


def test_a_module_that_is_not_here_is_warned_of_before_workers_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text("from models import Model, Data")
    args = args_of({**SMALL, "model": {"type": "parts.Model"}, "dataset": {"type": "no_such_module.Data"}})
    with working_in(str(tmp_path)):
        (text,) = check_names(args)
    assert text.startswith(
        "dataset.type no_such_module.Data: there is no module 'no_such_module' in the working directory"
    )
    monkeypatch.setitem(sys.modules, "without_specification", types.ModuleType("without_specification"))
    args = args_of({**SMALL, "model": {"type": "without_specification.Model"}, "dataset": {"type": "parts.Data"}})
    with working_in(str(tmp_path)):
        assert check_names(args) == []


def test_ray_is_asked_for_all_output_before_its_import(job: str) -> None:
    """Ray would print equal lines of several ranks once; it reads the variable when it is imported."""
    program = "\n".join(
        [
            "from raysgd.cli.main import main",
            f"assert main(['train', '-f', {job!r}, '--print-config']) == 0",
            "from ray._private.ray_constants import RAY_DEDUP_LOGS",
            "assert not RAY_DEDUP_LOGS",
        ]
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_DEDUP_LOGS"}
    subprocess.run([sys.executable, "-c", program], check=True, env={**environment, "PYTHONPATH": str(ROOT)})


def test_json_is_the_last_output_also_if_workers_print_late(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_to_end(words: list[str], what: str, run: Any) -> int:
        run()
        print("(rank 0) late")  # as Ray does until it is shut down
        return 0

    monkeypatch.setattr("raysgd.cli.train.run_to_end", run_to_end)
    monkeypatch.setattr("raysgd.declarative.entry.train", lambda *args, **kwargs: {"train_loss": 0.5})
    assert main(["train", "-f", job, "--json"]) == 0
    late, _, printed = capsys.readouterr().out.partition("\n")
    assert late == "(rank 0) late" and json.loads(printed) == {"train_loss": 0.5}
