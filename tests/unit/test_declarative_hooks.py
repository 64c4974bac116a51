"""Hooks of declarative trainings: their names and arguments, checked before anything starts, and what they get and may change."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raysgd
from raysgd.declarative import load_args
from raysgd.declarative.checking import _signature_of
from raysgd.declarative.hooks import HOOKS, Hooks, count_arguments
from raysgd.errors import CheckpointError, ConfigError
from support import declared
from support.declared_runs import STEPS, assert_equal, loop_of, numbers, run, training

#: The arguments of nnScaler's hooks where there are fewer than here.
SHORTER = {
    "on_train_step_start": ("trainer", "batches"),
    "on_train_step_end": ("trainer", "outputs"),
    "on_val_step_start": ("trainer", "batches"),
    "on_val_step_end": ("trainer", "outputs"),
    "after_aggregate_train_step_outputs": ("trainer", "aggregated_outputs", "train_loss"),
    "after_aggregate_val_step_outputs": ("trainer", "aggregated_outputs", "val_loss"),
}


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    declared.CALLS.clear()
    yield
    declared.CALLS.clear()


# -- names and arguments -----------------------------------------------------------------------------------------------------

JOB = """\
max_epochs: 1
model: {type: parts.Model}
optimizer: {type: torch.optim.SGD, args: {lr: 0.1}}
dataset: {type: parts.Data}
"""
PARTS = """\
import raysgd.declarative
from raysgd.declarative import TrainHook

def Data(): ...
class Model: ...
class Base(TrainHook):
    def on_epoch_end(self, trainer): ...
"""


def refusal_of(folder: Path, job: str, parts: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the error of a job file, and check that no module of the user is imported for it."""
    (folder / "job.yaml").write_text(JOB + job)
    (folder / "parts.py").write_text(f"{PARTS}{parts}\nraise RuntimeError('imported')\n")
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as caught:
        load_args("job.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (
            "def on_train_strt(self, trainer): ...",
            "has the method on_train_strt, which is not a hook.*did you mean 'on_train_start'",
        ),
        ("def on_train_epoch_end(self, trainer): ...", "on_train_epoch_end, which is not a hook"),
        ("def on_step_end(self): ...", r"on_step_end is called with \(trainer, epoch, .*but takes \(\)"),
        ("def on_step_end(self, trainer, epoch, idx, metrics, outputs, more): ...", "on_step_end is called with"),
        ("def on_train_start(self, trainer, *, more): ...", r"but takes \(trainer, \*, more\)"),
    ],
)
@pytest.mark.parametrize("base", ["", "(TrainHook)", "(raysgd.declarative.TrainHook)", "(Base)"])
def test_hook_with_a_wrong_name_or_arguments_is_refused_before_anything_starts(
    method: str, text: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal_of(tmp_path, "hook: {type: parts.Mine}", f"class Mine{base}:\n    {method}", monkeypatch)
    assert message.startswith("job.yaml, line 5, hook.type: ")
    with pytest.raises(ConfigError, match=text):
        raise ConfigError(message)


def test_methods_of_a_class_that_is_inherited_in_the_module_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = "class Wrong(Base):\n    def before_step(self, trainer): ...\nclass Mine(Wrong): ..."
    assert "before_step" in refusal_of(tmp_path, "hook: {type: parts.Mine}", parts, monkeypatch)


@pytest.mark.parametrize("section", ["model", "optimizer", "lr_scheduler"])
def test_components_that_are_hooks_are_checked_too(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = "class Mine(Other, TrainHook):\n    def on_epoch_ends(self, trainer): ..."
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "parts.py").write_text(PARTS + parts)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{section}.type: .*on_epoch_ends, which is not a hook"):
        load_args("job.yaml", [f"--{section}.type", "parts.Mine", "--optimizer.args!"])
    (tmp_path / "parts.py").write_text(PARTS + parts.replace(", TrainHook", ""))
    load_args("job.yaml", [f"--{section}.type", "parts.Mine", "--optimizer.args!"])  # its methods are not called


def test_function_with_too_many_arguments_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal_of(tmp_path, "hook:\n  on_epoch_end: parts.f", "def f(trainer, epoch, step): ...", monkeypatch)
    assert message.startswith(
        "job.yaml, line 6, hook.on_epoch_end: hook.on_epoch_end parts.f is called with (trainer, epoch)"
    )


def test_hooks_that_a_source_does_not_show_are_checked_by_the_worker(group: Any) -> None:
    with pytest.raises(ConfigError, match="Misnamed has the method on_train_strt, which is not a hook"):
        run(training(hook={"type": "support.declared.Misnamed"}))


def _signatures() -> st.SearchStrategy[str]:
    names = ["trainer", "epoch", "idx", "batches", "other", "more"]

    def write(needed: int, optional: list[str], has_star: bool, keywords: list[str]) -> str:
        words = names[:needed] + [f"{name}=0" for name in optional if name not in names[:needed]]
        words += ["*args"] * has_star or ["*"] * bool(keywords)
        return ", ".join(words + [f"key_{place}{value}" for place, value in enumerate(keywords)])

    optional = st.lists(st.sampled_from(names), unique=True, max_size=3)
    return st.builds(
        write, st.integers(0, 6), optional, st.booleans(), st.lists(st.sampled_from(["", "=0"]), max_size=2)
    )


@given(st.sampled_from(sorted(HOOKS)), _signatures())
def test_hook_is_called_with_what_it_takes_or_refused_from_source_and_object_alike(name: str, signature: str) -> None:
    source = f"lambda {signature}: {{**locals()}}"
    function = eval(source)
    node = ast.parse(source, mode="eval").body
    assert isinstance(node, ast.Lambda)
    found = []
    for given_signature in (inspect.signature(function), _signature_of(node.args, is_bound=False)):
        try:
            found.append(count_arguments(name, "hook", given_signature))
        except ConfigError:
            found.append(0)
    assert found[0] == found[1]
    parameters = inspect.signature(function).parameters.values()
    needed = [
        each.name for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    is_callable = len(needed) <= len(HOOKS[name]) and not any(
        each.kind is each.KEYWORD_ONLY and each.default is each.empty for each in parameters
    )
    if found[0]:
        got = function(*HOOKS[name][: found[0]])
        assert is_callable and list(got.values())[: len(needed)] == list(HOOKS[name][: len(needed)])
        options = [each.name for each in parameters if each.default == 0]
        assert all(got[option] in (0, option) for option in options)  # never the value of another argument
    else:
        assert not is_callable or not needed  # one that need not have the trainer is none


def test_hooks_of_nnscaler_are_called_with_its_arguments() -> None:
    calls: list[Any] = []

    def make(name: str) -> Any:
        arguments = ", ".join(SHORTER.get(name, HOOKS[name]))
        return eval(f"lambda {arguments}: calls.append(({arguments},))", {"calls": calls})

    owner = type("Mine", (), {name: staticmethod(make(name)) for name in HOOKS})()
    hooks = Hooks({"hook": owner})
    for name in HOOKS:
        hooks.call(name, *HOOKS[name])
    assert calls == [SHORTER.get(name, HOOKS[name]) for name in HOOKS]


# -- what hooks get and change -------------------------------------------------------------------------------------------------


def _reports(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "raysgd.session.local.LocalSession.report", lambda self, metrics: reported.append(dict(metrics))
    )
    return reported


def test_metrics_that_hooks_change_and_log_are_reported_and_logged(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = _reports(monkeypatch)
    log = [{"type": "support.declared.Logger", "args": {"name": "mine"}}]
    run(
        numbers(
            [1.0, 2.0, 3.0],
            max_train_steps=2,
            dataset__val_args={"values": [1.0]},
            val_every_n_train_steps=1,
            hook="support.declared.ChangingMetrics",
            log=log,
        )
    )
    assert [(each["doubled"], each["train_loss"]) for each in reported] == [(2.0, 1.0), (0.0, 0.0)]
    assert [each["percent"] for each in reported] == [100 * each["val_loss"] for each in reported]
    assert [each["train/seen"] for each in reported] == [0, 1]
    assert all("loss" not in each for each in reported)
    assert [call[2:] for call in declared.CALLS if call[:2] == ("mine", "train") and "seen" in call[3]] == [
        (0, ["seen"]),
        (1, ["seen"]),
    ]
    assert [call for call in declared.CALLS if call[0] == "on_step_end"] == [
        (
            "on_step_end",
            1,
            0,
            0,
            ["doubled", "epoch", "gnorm", "loss", "lr", "rows", "step", "train_loss", "train_wall"],
        ),
        (
            "on_step_end",
            2,
            0,
            1,
            ["doubled", "epoch", "gnorm", "loss", "lr", "rows", "step", "train_loss", "train_wall"],
        ),
    ]


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_epochs": 2}, 2 * STEPS),
        ({"max_epochs": 2, "max_train_steps": 3}, 3),
        ({"max_epochs": None, "max_train_steps": 20}, 20),
    ],
)
def test_scheduler_functions_and_hooks_find_the_length_of_the_training(
    limits: dict[str, Any], steps: int, group: Any
) -> None:
    scheduler = {"type": "support.declared.scheduler_of_the_loop", "interval": "step"}
    run(training(**limits, init_env_fn="support.declared.keep_trainer", lr_scheduler=scheduler))
    trainer = declared.CALLS[0]
    assert declared.CALLS[1] == trainer.max_train_steps == steps
    assert trainer.total_train_steps_per_epoch == STEPS
    assert len(trainer.dataset["train"]) == 21 and trainer.dataset["val"] is None
    assert (trainer.local_rank, trainer.local_world_size, trainer.node_rank) == (0, 1, 0)


@pytest.mark.parametrize("steps", range(1, 2 * STEPS + 1))
def test_each_epoch_that_is_trained_on_ends_also_the_one_that_the_last_step_leaves(steps: int, group: Any) -> None:
    run(training(max_train_steps=steps, hook="support.declared.Everything"))
    names = [name for _, name in declared.CALLS]
    assert names.count("on_epoch_start") == names.count("on_epoch_end") == -(-steps // STEPS)
    assert names.count("on_step_start") == names.count("on_step_end") == steps
    assert names[-3:] == ["on_epoch_end", "on_train_end", "on_finalize"]


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 2, None])
def test_steps_of_a_validation_have_as_many_micro_batches_as_those_of_the_training(
    accumulation: int, limit: int | None, group: Any
) -> None:
    rows = [1.0, 2.0, 6.0, 3.0, 8.0, 4.0, 5.0]
    run(
        numbers(
            [0.0],
            dataset__val_args={"values": rows},
            micro_batch_size=2,
            grad_accumulation_steps=accumulation,
            max_val_steps=limit,
            hook="support.declared.SeenValidation",
        )
    )
    batches = [rows[place : place + 2] for place in range(0, len(rows), 2)]
    steps = [batches[place : place + accumulation] for place in range(0, len(batches), accumulation)][:limit]
    seen = list(itertools.chain(*itertools.chain(*steps)))
    assert [*steps, pytest.approx(sum(seen) / len(seen))] == declared.CALLS


def test_failed_training_is_finalized(group: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        run(training(hook="support.declared.FailingHook"))
    assert declared.CALLS == ["on_finalize"]


def test_hooks_see_the_state_that_is_saved_and_change_what_is_restored(group: Any, tmp_path: Path) -> None:
    values = training(max_train_steps=1, hook="support.declared.ChangingCheckpoints")
    _, saved = run(values, tmp_path)
    assert declared.CALLS == [("saved", ["engine", "model", "optimizer", "rank", "train_status"], 1)]
    declared.CALLS.clear()
    with raysgd.local(dir=tmp_path):
        loop = loop_of({**values, "max_train_steps": 1})
        loop.train()
        assert_equal({name: 2 * each for name, each in saved.items()}, loop.model.state_dict())
    assert declared.CALLS == [("on_load", 0, {"mine": 7}), ("after_load", 1, {"mine": 7})]


def test_hook_that_replaces_what_is_saved_is_refused(group: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_save_checkpoint has replaced or removed 'model' of the checkpoint"):
        run(training(max_train_steps=1, hook="support.declared.ReplacingCheckpoints"), tmp_path)


def test_checkpoint_of_another_loop_is_refused(group: Any, tmp_path: Path) -> None:
    with raysgd.local(dir=tmp_path):
        raysgd.save_checkpoint({"weight": torch.ones(2)})
        with pytest.raises(CheckpointError, match="was not saved by a declarative training"):
            loop_of(training()).train()


def test_setup_that_draws_does_not_change_a_resumed_training(group: Any, tmp_path: Path) -> None:
    values = training(hook="support.declared.DrawingSetup", max_train_steps=2 * STEPS)
    whole, weights = run(values)
    run({**values, "max_train_steps": STEPS + 2}, tmp_path)
    resumed, weights_of_resumed = run(values, tmp_path)
    assert resumed["train_loss"] == whole["train_loss"]
    assert_equal(weights, weights_of_resumed)
