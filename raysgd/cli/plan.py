"""``raysgd plan``: choose strategies for a model, or for a training of a YAML file, before anything is started. Driver side.

Nothing is allocated, and Ray is not started.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import click

from raysgd.cli.console import SUCCEEDED, json_flag, print_json
from raysgd.cli.engine_flags import FILE_FLAG, PREFIX, engine_flags
from raysgd.cli.flags import FieldsCommand, Flag, FlagsCommand, parse_bool, parse_int, parse_number
from raysgd.cli.train import allow_flag, check_flags
from raysgd.config.argument_names import nearest
from raysgd.config.checks import check_choice
from raysgd.errors import ConfigError


def _parse_device(text: str) -> str:
    return check_choice("device", text, ("cuda", "cpu"))


_ARGUMENT = "MODULE:FUNCTION"
_NOT_FIXED = (FILE_FLAG, f"{PREFIX}plan", f"{PREFIX}memory-per-device")
_PLACES = "a function, as module:function; the module is searched for in this folder, too"
_FLAGS = [
    Flag("--batch", metavar=_ARGUMENT, help=f"returns the rows of one optimizer step of all workers: {_PLACES}"),
    Flag("--num-workers", parse=parse_int, metavar="N", help="devices"),
    Flag("--memory-per-device", parse=parse_number, metavar="BYTES", help="bytes of a device, such as 80e9"),
    Flag("--device", parse=_parse_device, metavar="cuda|cpu", help="where the training will run (default: cuda)"),
    Flag("--loss", metavar=_ARGUMENT, help="computes the loss of a model and a batch (default: the loss of the model's output)"),
    Flag("--optimizer", metavar=_ARGUMENT, help="makes the optimizer of a list of parameters (default: AdamW)"),
    Flag("--margin", parse=parse_number, metavar="NUMBER", help="part of the memory that is kept free (default: 0.05)"),
    Flag("--json", parse=parse_bool, metavar="true|false", is_switch=True, help="print JSON, for programs"),
]  # fmt: skip
_NEEDED = ("--batch", "--num-workers", "--memory-per-device")


@click.pass_context
def _execute(ctx: click.Context, /, model: str, **_: Any) -> int:
    given = command.given(ctx)
    for flag in _NEEDED:
        if flag not in given:
            raise ConfigError(f"raysgd plan needs {flag}; `raysgd plan --help` shows an example.")
    sys.path.insert(0, os.getcwd())
    functions = {name: load_function(given[name], name) for name in ("--loss", "--optimizer") if name in given}
    model_fn, batch_fn = load_function(model, "MODEL"), load_function(given["--batch"], "--batch")
    from raysgd.engine.planning.strategy_plan import plan

    options: dict[str, Any] = {
        "loss_fn": functions.get("--loss"),
        "device": given.get("--device", "cuda"),
        "margin": given.get("--margin", 0.05),
        **({"optimizer_fn": functions["--optimizer"]} if "--optimizer" in functions else {}),
    }
    fixed = {_field_of(name): value for name, value in given.items() if name.startswith(PREFIX)}
    found = plan(model_fn, batch_fn(), given["--num-workers"], given["--memory-per-device"], **options, **fixed)
    if given.get("--json"):
        print_json(_to_json(found))
    else:
        print(found)
        words = [f"{PREFIX}{name.replace('_', '-')} {_text(value)}" for name, value in found.config.given().items()]
        print(f"\nloader batches of {found.loader_batch_size} rows; flags of `raysgd run`: {' '.join(words) or 'none'}")
    return SUCCEEDED


def load_function(name: str, place: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names.

    Raises:
        ConfigError: It does not exist.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{place} {name}: give module:function, such as model:make_model.")
    if module_name.endswith(".py"):
        raise ConfigError(
            f"{place} {name}: give the name of the module, {module_name[:-3].replace('/', '.')}:{attribute}."
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ConfigError(f"{place} {name}: there is no module {module_name} in {os.getcwd()} or installed.") from None
    found = getattr(module, attribute, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{place} {name}: {module_name} has no function {attribute}{nearest(attribute, functions)}.")
    return found  # type: ignore[no-any-return]


def _field_of(flag: str) -> str:
    return flag.removeprefix(PREFIX).replace("-", "_")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _to_json(found: Any) -> Mapping[str, Any]:
    def candidate(one: Any) -> dict[str, Any]:
        return {
            "strategy": one.describe(),
            "config": one.config.given(),
            "rows": one.num_rows,
            "is_fitting": one.is_fitting,
            "memory": {**_plain(one.memory), "total": one.memory.total},
            "step_s": one.step_s,
        }

    return {
        "chosen": candidate(found.chosen),
        "loader_batch_size": found.loader_batch_size,
        "reason": found.reason,
        "candidates": [candidate(one) for one in found.candidates],
        "refused": dict(found.refused),
        "num_workers": found.num_workers,
        "memory_per_device": found.memory_per_device,
        "num_parameters": found.num_parameters,
    }


def _plain(value: Any) -> dict[str, Any]:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else dict(vars(value))


@click.command(
    "plan", cls=FieldsCommand, context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
)
@click.option("-f", "--file", "path", metavar="FILE", required=True, help="The YAML file of `raysgd train`.")
@allow_flag
@json_flag
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--NAME VALUE ...]")
def of_file(path: str, allowed: Sequence[str], as_json: bool, words: Sequence[str]) -> int:
    """Choose the strategies by which the training of a YAML file fits into the memory of its devices."""
    from raysgd.declarative.entry import load_args, plan_training

    check_flags(words, of_file)
    found = plan_training(load_args(path, words), allow_import=list(allowed) or None)
    if as_json:
        print_json(_to_json(found))
        return SUCCEEDED
    print(found)
    fields = [f"--engine.{name} {_text(value)}" for name, value in found.config.given().items()]
    print(f"\nflags of `raysgd train`: {' '.join(fields) or 'none'}")
    return SUCCEEDED


class PlanCommand(FlagsCommand):
    """The command ``raysgd plan``, whose flags are others with ``-f FILE``."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the words; see `click.Command.make_context`."""
        if any(word.partition("=")[0] in ("-f", "--file") for word in args):
            return of_file.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


command = PlanCommand(
    "plan",
    hints={},
    callback=_execute,
    params=[
        *_FLAGS,
        *(flag for flag in engine_flags() if flag.flag not in _NOT_FIXED),
        click.Argument(["model"], metavar=f"MODEL ({_ARGUMENT})"),
    ],
    options_metavar="[FLAGS]",
    help=(
        "Choose the strategies by which the model that MODULE:FUNCTION makes fits into the memory of the devices, the fastest "
        "first. Nothing is allocated and nothing is started.\n\n"
        "\b\nraysgd plan --batch model:make_batch --num-workers 8 --memory-per-device 80e9 model:make_model\n"
        "raysgd plan -f job.yaml\n\n"
        "The second form plans the training of a YAML file; `raysgd plan -f FILE --help` shows its flags.\n\n"
        "Flags --engine.* are chosen by you, and not varied."
    ),
)
