"""Values of a file and of a command line: all arrive as they are meant, or are refused by their names."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from raysgd.cli.main import main
from raysgd.cli.train import command
from raysgd.declarative import load_args
from raysgd.declarative.args import HookConfig, as_values
from raysgd.declarative.entry import _Job, split_folder
from raysgd.declarative.reading import args_of, merge
from raysgd.declarative.values import Importer, guess
from raysgd.errors import ConfigError

SMALL: dict[str, Any] = {
    "model": {"type": "my.Model"},
    "optimizer": {"type": "my.SGD", "args": {"lr": 0.1}, "clip_gnorm": 1.0},
    "dataset": {"type": "my.Data", "train_args": {"size": 3}},
    "max_epochs": 1,
}
TRICKY = [
    "-1", "-.5", "-half", "-f", "--lr", "-", "a=b", "=", "a.b", "a: b", "a #b", "'", '"a"', "$", "$$", "$1", "1e-4", "010",
    "0x1f", "1_000", "1:30", "2024-01-01", "null", "None", "~", "true", "yes", "No", "on", "", " a", "[CLS]", "{x}", "[CLS] a",
    "...", ".inf", "@a", "!x", "*x", "&x", "%a", "|", ">", "é", "a\nb", "[1, 2]", "{1: 2}", "a,b", "{0}", "x" * 5000, "(",
    "1.5.2",
]  # fmt: skip
TEXTS = st.sampled_from(TRICKY) | st.text(alphabet="ab01-+=.:#'\"$[]{}(), ~eE!\n")
KEYS = st.sampled_from(["a", "b-c", "b_c", "d.e", "0", "é", "a b", "lr"]) | st.integers(0, 3)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["width", "cfg", "names", "x_args"]), TREES, min_size=1, max_size=3)


def read(values: dict[str, Any], words: list[str], folder: Path) -> dict[str, Any]:
    """Return the arguments that the model gets."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values, allow_unicode=True))
    given = command.make_context("train", ["-f", str(path), *words]).params["words"]
    args = load_args(path, given)
    assert args_of(as_values(args)) == args  # as workers get it
    found: dict[str, Any] = {key: Importer().resolve(value) for key, value in args.model.args.items()}
    return found


def with_model(args: Any) -> dict[str, Any]:
    return {**SMALL, "model": {"type": "my.Model", "args": args}}


def words_of(tree: Any, name: str, *, is_joined: bool) -> list[str]:
    """Return the flags that set the leaves of a tree."""
    if isinstance(tree, (dict, list)) and tree:
        entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [word for key, value in entries for word in words_of(value, f"{name}.{key}", is_joined=is_joined)]
    text = tree if isinstance(tree, str) else json.dumps(tree)
    if text[:1] in tuple("[{") and isinstance(tree, str) and guess(tree) == tree:
        text = json.dumps(text)
    text = {"Infinity": ".inf", "-Infinity": "-.inf"}.get(text, text)
    return [f"--{name}={text}"] if is_joined or text.startswith("--") or text in ("-f",) else [f"--{name}", text]


def emptied(tree: Any) -> Any:
    """Return the tree with other leaves."""
    if isinstance(tree, dict) and tree:
        return {key: emptied(value) for key, value in tree.items()}
    return [emptied(value) for value in tree] if isinstance(tree, list) and tree else "old"


@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None, max_examples=300
)
@hypothesis.given(args=ARGUMENTS, is_joined=st.booleans())
def test_values_of_a_file_and_of_flags_arrive_equal(tmp_path: Path, args: dict[str, Any], is_joined: bool) -> None:
    def outcome(values: dict[str, Any], words: list[str]) -> Any:
        try:
            return read(values, words, tmp_path)
        except ConfigError as error:
            return str(error)

    expected = outcome(with_model(args), [])
    if isinstance(expected, str):
        assert re.search(r"job.yaml, line \d+, model.args.*refers to", expected, re.DOTALL)
        return
    whole = yaml.safe_dump(args, default_flow_style=True, width=10**9, allow_unicode=True)
    assert repr(outcome(SMALL, [f"--model.args={whole}"])) == repr(expected)
    assert repr(outcome(with_model({"gone": 1}), ["--model.args", whole])) == repr(expected)
    found = outcome(with_model(emptied(args)), words_of(args, "model.args", is_joined=is_joined))
    if isinstance(found, str):
        assert re.search(r"model\.args.*(is a bool in YAML 1.1|may be in)", found, re.DOTALL)
    else:
        assert repr(found) == repr(expected)


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None)
@hypothesis.given(text=TEXTS)
def test_a_text_that_stands_for_nothing_else_arrives_as_it_is(tmp_path: Path, text: str) -> None:
    hypothesis.assume(guess(text) == text and not re.search(r"\$[({]|^~(/|$)", text))
    assert read(with_model({"name": text}), [], tmp_path) == {"name": text}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-4", 1e-4), ("-1e3", -1000.0), ("0x10", 16), ("1_000", 1000), ("TRUE", True), ("Null", None), ("None", None),
        (".inf", float("inf")), ("010", "010"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("=", "="), ("'no'", "no"),
        ("y", "y"), ("1.2.3", "1.2.3"), ("[1e-4, 010, no-op]", [1e-4, "010", "no-op"]), ("...", "..."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("section", ["model.args", "compute_config.user_config"])
def test_plain_values_mean_the_same_in_arguments_and_sections_of_the_user(
    tmp_path: Path, written: str, value: Any, section: str
) -> None:
    path = tmp_path / "job.yaml"
    first, second = section.split(".")
    values = {**SMALL, "compute_config": {"user_config": {}}}
    values[first] = {**values[first], second: {"x": "HERE"}}
    path.write_text(yaml.safe_dump(values).replace("HERE", written if written != "..." else "'...'"))
    word = f"\"'{written[1:-1]}'\""[1:-1] if written.startswith("'") else written
    for args in (load_args(path), load_args(path, [f"--{section}.x", word])):
        found = args.model.args if first == "model" else args.compute.user_config
        assert repr(Importer().resolve(found)) == repr({"x": value})
        if first != "model":
            assert repr(found) == repr({"x": value})  # hooks get it as it is


@pytest.mark.parametrize("word", ["yes", "No", "ON", "off"])
def test_a_word_that_may_be_a_bool_is_refused_where_no_field_says_so(tmp_path: Path, word: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model:\n  type: my.Model\n  args:\n    names: [en, {word}]\n")
    with pytest.raises(
        ConfigError, match=rf"job.yaml, line 4, model.args.names.1: {word} is a bool in YAML 1.1.*write"
    ):
        load_args(path)
    path.write_text(yaml.safe_dump(SMALL))
    for words in (["--optimizer.args.nesterov", word], [f"--optimizer.args={{lr: 0.1, nesterov: {word}}}"]):
        with pytest.raises(ConfigError, match=f"optimizer.args.nesterov: {word} is a bool"):
            load_args(path, words)
    assert load_args(path, ["--enable_progress_bar", word]).enable_progress_bar is (word in ("yes", "ON"))


@pytest.mark.parametrize(
    ("words", "args"),
    [
        (["--model.args.id2label.1", "c"], {"id2label": {0: "a", 1: "c"}}),
        (["--model.args.id2label.2=c"], {"id2label": {0: "a", 1: "b", 2: "c"}}),
        (["--model.args.id2label.1!"], {"id2label": {0: "a"}}),
        (["--model.args.rates.lr-max", "2"], {"rates": {"lr-max": "2", "block.0": {"lr": 1}}}),
        (["--model.args.rates.lr-min", "2"], {"rates": {"lr-max": 1, "block.0": {"lr": 1}, "lr-min": "2"}}),
        (["--model.args.rates.block.0.lr", "2"], {"rates": {"lr-max": 1, "block.0": {"lr": "2"}}}),
        (["--model.args.groups.1.lr", "2"], {"groups": [{"lr": 1}, {"lr": "2"}]}),
        (["--model.args.groups.0!"], {"groups": [{"lr": 3}]}),
        (["--model.args.groups+={lr: 5}"], {"groups": [{"lr": 1}, {"lr": 3}, {"lr": 5}]}),
        (["--model.args.groups-={lr: 1}"], {"groups": [{"lr": 3}]}),
        (["--model.args.num-layers", "2"], {"num_layers": "2"}),
        (["--model.args.width", "1", "--model.args.width", "2"], {"width": "2"}),
        (["--model.args.width="], {"width": ""}),
        (["--model.args.pair", "(1, 2)", "--model.args.first", "[a, 1]"], {"pair": "(1, 2)", "first": ["a", 1]}),
    ],
)
def test_flags_change_entries_of_mappings_and_lists(tmp_path: Path, words: list[str], args: dict[str, Any]) -> None:
    path = tmp_path / "job.yaml"
    base = {
        "id2label": {0: "a", 1: "b"},
        "rates": {"lr-max": 1, "block.0": {"lr": 1}},
        "groups": [{"lr": 1}, {"lr": 3}],
    }
    path.write_text(yaml.safe_dump(with_model(base)))
    assert load_args(path, words).model.args == base | args


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--max_epochs.x", "1"], r"command line \(--max_epochs.x 1\): max_epochs is 1, which has no field 'x'"),
        (["--model.args.sizes.0.x", "1"], "model.args.sizes.0 is 5, which has no field 'x'"),
        (["--model.args.sizes.1!"], "model.args.sizes has no entry '1'; the last one is 0"),
        (["--model.args.sizes-=7"], r"model.args.sizes has no entry '7'; it is \[5\]"),
        (["--model.type+=x"], "model.type is 'my.Model', not a list"),
        (["--model.args.a.b", "1"], r"model.args.a.b may be in 'a' or 'a.b'; give the mapping as a whole"),
        (["--optimizer.args", "{lr: 0.2"], "args='{lr: 0.2' is not a mapping"),
    ],
)
def test_a_flag_that_cannot_be_is_refused(tmp_path: Path, words: list[str], text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(with_model({"sizes": [5], "a": {"b": 1}, "a.b": 2})))
    with pytest.raises(ConfigError, match=text):
        load_args(path, words)


def test_a_component_is_replaced_with_its_arguments_and_the_other_fields_of_its_section_stay(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    adam = {"type": "torch.optim.Adam", "args": {"eps": 1}, "clip_gnorm": 1.0}
    for words in (
        ["--optimizer", "{type: torch.optim.Adam, args: {eps: 1}}"],
        ["--optimizer", "torch.optim.Adam", "--optimizer.args.eps", "1"],
        ["--optimizer.type", "torch.optim.Adam", "--optimizer.args", "{eps: 1}"],
        ["--optimizer.args!", "--optimizer.type", "torch.optim.Adam", "--optimizer.args.eps=1"],
    ):
        args = load_args(path, words).optimizer
        assert (args.type, {**args.args, "eps": int(args.args["eps"])}, args.clip_gnorm) == tuple(adam.values())
    assert load_args(path, ["--optimizer.args", "{momentum: 0.5}"]).optimizer.args == {"momentum": 0.5}
    with pytest.raises(
        ConfigError, match=r"--optimizer.type torch.optim.Adam\), optimizer.type: .* would get: lr. Give optimi"
    ):
        load_args(path, ["--optimizer.type", "torch.optim.Adam"])
    assert load_args(path, ["--optimizer.type", "my.SGD"]).optimizer.args == {"lr": 0.1}
    assert merge(SMALL, {"optimizer.args.eps": 1, "optimizer": {"type": "torch.optim.Adam"}})["optimizer"] == adam
    path.write_text(yaml.safe_dump({**SMALL, "model": "my.Model", "log": ["my.Logger"], "hook": "my.Hook"}))
    short = load_args(path)
    assert isinstance(short.hook, HookConfig)
    assert (short.model.type, short.log[0].type, short.hook.type) == ("my.Model", "my.Logger", "my.Hook")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--resume_from", "last"], "no such field (did you mean 'checkpoint.resume_from'?)"),
        (["--resume_form", "last"], "no such field (did you mean 'checkpoint.resume_from'?)"),
        (["--save_dir", "x"], "no such field (did you mean 'checkpoint.save_dir'?)"),
        (["--num_workers", "2"], "no such field (did you mean 'trainer.num_workers'?)"),
        (["--zero_stage", "1"], "no such field (did you mean 'engine.zero_stage'?)"),
        (["--optimizer.lr", "1"], "no such field (did you mean 'args.lr'?)"),
        (["--modle", "my.Model"], "no such field (did you mean 'model'?)"),
        (["--log", "[TensorBoardLoger]"], "log.0.type: type='TensorBoardLoger' is not the full name"),
        (["--log", "[TensorBoardLoger]"], "(did you mean 'TensorBoardLogger'?)"),
        (["--log", "TensorBoardLogger"], "log='TensorBoardLogger' is not a list; give [TensorBoardLogger]."),
        (["--max_epochs"], "(--max_epochs without a value), max_epochs: max_epochs=True is a bool; give an int."),
        (["--model.args.x", "{a: ${max_epochs}}"], "in brackets, quote references: {a: '${NAME}'}"),
        (["--model.args.x", "$(HOME)"], "which is not set; write ${HOME} for the variable of the environment"),
        (["--model.args.x", "${micro_batch}"], "(did you mean 'micro_batch_size'?)"),
        (["--checkpoint.save_dir", "a$(optimizer.args)"], "$(optimizer.args) is a mapping, which cannot be a part of"),
        (["--model.args.x", "$(seed)"], "$(seed) refers to seed, which has no value; give one"),
        (["--trainer.backend", "toch"], "trainer.backend: backend='toch' is not known (did you mean 'torch'?)"),
        (["--trainer.runtime_env", "3"], "trainer.runtime_env: runtime_env=3 is not a mapping"),
        (["--trainer.deterministic", "maybe"], "trainer.deterministic: deterministic='maybe' is not a bool"),
        (["--trainer.num_workers", "3"], "trainer.num_workers: 3 workers cannot take 1 rows of an optimizer step"),
        (["--engine.tensor_parallel", "3"], "engine: num_workers=1 with workers_per_replica=3"),
        (["--log.0", "{type: WandbLogger, args: {mode: x}}"], "log.0.args.mode: WandbCallback(mode)='x' is not known"),
        (["--log.0", "{type: TensorBoardLogger, args: {name: a b}}"], "log.0.args.name: TensorBoardCallback(subdir)="),
    ],
)
def test_a_mistake_is_refused_when_the_file_is_read_and_the_message_says_what_to_write(
    tmp_path: Path, words: list[str], text: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    with pytest.raises(ConfigError, match=re.escape(text)) as found:
        load_args(path, words)
    assert f"command line ({words[0]}" in str(found.value)


@pytest.mark.parametrize(
    "name", ["log", "trainer", "engine", "dataloader", "checkpoint", "model.args", "dataset.val_args"]
)
def test_a_section_without_entries_is_an_empty_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(merge(SMALL, {name: None})))
    assert load_args(path) == args_of(SMALL)
    path.write_text(yaml.safe_dump(SMALL))
    assert load_args(path, [f"--{name}", "null"]) == args_of(SMALL)


def test_a_reference_to_a_field_that_is_not_given_is_its_default(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(with_model({"a": "$(val_every_n_epochs)", "b": "${ checkpoint.save_dir }/x"})))
    assert load_args(path).model.args == {"a": 1, "b": "./checkpoints/x"}


def test_references_to_fields_the_environment_and_the_home_folder_are_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/somewhere/of_mine")
    monkeypatch.setenv("RUNS_OF_MINE", "~/runs")
    monkeypatch.setenv("ROWS", "4")
    path = tmp_path / "job.yaml"
    args = {
        "a": "${max_epochs}",
        "b": "$${HOME}",
        "c": "$$(x)",
        "d": "$$ $HOME",
        "e": "~",
        "f": "a~/b",
        "g": "${HOME}/$(max_epochs)",
    }
    path.write_text(yaml.safe_dump({**with_model(args), "checkpoint": {"save_dir": "${RUNS_OF_MINE}/line"}}))
    words = ["--micro_batch_size", "${ROWS}", "--model.args.h", "~/data"]
    found = load_args(path, words)
    assert (found.checkpoint.save_dir, found.micro_batch_size) == ("/somewhere/of_mine/runs/line", 4)
    assert found.model.args == {
        "a": 1, "b": "${HOME}", "c": "$(x)", "d": "$$ $HOME", "e": "/somewhere/of_mine", "f": "a~/b", "g": "/somewhere/of_mine/1",
        "h": "/somewhere/of_mine/data",
    }  # fmt: skip
    assert args_of(as_values(found)) == found  # what is resolved is not resolved again
    path.write_text(yaml.safe_dump(with_model({"a": "${NO_SUCH}/x"})))
    with pytest.raises(
        ConfigError, match=r"job.yaml, line \d+, model.args.a: \$\{NO_SUCH\} refers to NO_SUCH, .* neither"
    ):
        load_args(path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--seed", "1", "-f", "other.yaml"], "-f is given twice"),
        (["--json", "--json"], "--json is given twice"),
    ],
)
def test_a_flag_of_the_command_is_given_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    assert main(["train", "-f", str(path), *words, "--print-config"]) == 2
    assert text in capsys.readouterr().err


def test_folders_in_the_home_folder_are_found_from_python_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere/of_mine")
    assert split_folder("~/runs/line") == ("/somewhere/of_mine/runs", "line")
    job = _Job.of(dataclasses.replace(args_of(SMALL), gen_savedir="~/plans", trainer={"ray_address": "$${x}"}), None)
    assert (job.args.gen_savedir, job.args.trainer["ray_address"]) == ("/somewhere/of_mine/plans", "$${x}")


@pytest.mark.parametrize(
    "name", ["checkpoint.save_dir", "checkpoint.resume_from", "gen_savedir", "tracing_from_weights"]
)
def test_a_path_with_a_variable_that_is_not_resolved_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name}: .*='/data/\$USER/runs' has \$USER, .* write \$\{{USER\}} in a file"
    ):
        args_of(merge(SMALL, {name: "/data/$USER/runs"}))


def test_a_reference_to_a_field_that_a_search_changes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    values = {**with_model({"peak": "$(optimizer.args.lr)"}), "search": {"space": {"optimizer.args.lr": [0.1, 0.2]}}}
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(
        ConfigError, match=r"model.args.peak: .* refers to optimizer.args.lr, which search.space changes"
    ):
        load_args(path)


def test_a_space_inside_of_a_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    model = {"type": "my.Model", "args": {"width": {"randint": [1, 4]}}}
    path.write_text(yaml.safe_dump({**SMALL, "search": {"space": {"model": {"choice": [model]}}}}))
    with pytest.raises(ConfigError, match=r"search.space.model: .*'randint'.* only a whole field has a space"):
        load_args(path)


def annotated(version: str, size: int = 0, other: object = None) -> tuple[str, int, object]:
    return version, size, other


def test_an_argument_that_is_annotated_as_a_text_stays_one() -> None:
    given = {"version": "2", "size": "3", "other": "4"}
    assert Importer().build(f"{__name__}.annotated", given) == ("2", 3, 4)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("true", True), ("False", False), ("null", None), (".inf", float("inf")), ("+.Inf", float("inf"))],
        *[
            ("-.inf", float("-inf")),
            ("1e-4", 1e-4),
            ("(1, 'a')", (1, "a")),
            ("...", "..."),
            ("a.b", "a.b"),
            ("010", "010"),
        ],
    ],
)
def test_text_is_the_value_that_python_or_yaml_has_for_it(text: str, value: Any) -> None:
    assert guess(text) == value and type(guess(text)) is type(value)
