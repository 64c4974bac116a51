"""``raysgd train -f FILE``: a training that a YAML file describes, with any value changed on the command line. Driver side.

What needs Ray is imported after the file was checked.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import click

from raysgd._util.logs import get_logger
from raysgd.cli.console import SUCCEEDED, F, json_flag, number, print_error, print_json
from raysgd.cli.flags import FieldsCommand
from raysgd.cli.run import run_to_end, show_all_output
from raysgd.config.argument_names import nearest
from raysgd.errors import ConfigError

_HELP = """Train a model as a YAML file says.

Any value of the file can be changed: `--max_epochs 2`, `--model.args.dim=32`, `--log.0.type TensorBoardLogger`;
`--max_train_steps!` removes one. `--help NAME` explains a field, and `--help model.args` lists the arguments of the class.
"""


def allow_flag(function: F) -> F:
    """Decorate a command: it has the flag ``--allow-import``, given as the argument ``allowed``."""
    return click.option(
        "--allow-import",
        "allowed",
        multiple=True,
        metavar="MODULE",
        help="Import components from this module, and those below it, alone; may be repeated (default: any).",
    )(function)


class TrainCommand(FieldsCommand):
    """The command, whose help lists the fields of a file, too; ``--help NAME`` one of them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the command's name; see `FieldsCommand.parse_args`."""
        pairs = [word in ("-h", "--help") and following[:1] not in ("-", "") for word, following in pairwise(args)]
        if True not in pairs:
            return super().parse_args(ctx, args)
        place = pairs.index(True)
        super().parse_args(ctx, [*args[:place], *args[place + 2 :]])
        from raysgd.declarative.checking import working_in
        from raysgd.declarative.reading import Tree
        from raysgd.declarative.schema import list_help
        from raysgd.declarative.values import Importer

        tree = Tree.of_file(ctx.params["path"]) if ctx.params["path"] else Tree()
        tree.override(ctx.params["words"])
        formatter = ctx.make_formatter()
        with working_in(os.getcwd()):
            formatter.write_dl(
                list(list_help(args[place + 1], tree.resolved(), Importer(ctx.params["allowed"] or None)))
            )
        click.echo(formatter.getvalue(), nl=False)
        raise click.exceptions.Exit(SUCCEEDED)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and the fields with what they may be and their defaults."""
        from raysgd.declarative.schema import list_fields, make_schema

        super().format_options(ctx, formatter)
        with formatter.section("Fields of the file"):
            formatter.write_dl(list(list_fields(make_schema())))


@click.command(
    "train",
    cls=TrainCommand,
    help=_HELP,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
    options_metavar="-f FILE",
)
@click.option("-f", "--file", "path", metavar="FILE", help="The YAML file.")
@allow_flag
@click.option("--print-config", is_flag=True, help="Print all fields with their values, as YAML, and do not train.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of the file, for editors, and do not train.")
@click.option(
    "--evaluate",
    "stage",
    type=click.Choice(["val", "test"]),
    help="Compute the loss of this data with the weights of --checkpoint.resume_from, and do not train.",
)
@click.option(
    "--grace",
    type=number(0),
    metavar="SECONDS",
    help="Time to save and end after Ctrl-C or SIGTERM, as trainer.failure_config.stop_grace_s (default: 30).",
)
@click.option(
    "--export",
    "folder",
    metavar="FOLDER",
    help="Write the model, with the weights of --checkpoint.resume_from or last, to FOLDER for transformers; do not train.",
)
@json_flag
@click.pass_context
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--NAME VALUE ...]")
def command(
    ctx: click.Context,
    /,
    path: str | None,
    allowed: Sequence[str],
    print_config: bool,
    schema: bool,
    stage: Any,
    grace: float | None,
    folder: str | None,
    as_json: bool,
    words: Sequence[str],
) -> int:
    """Train; return the exit status: 1 if the training failed, 2 if a value cannot work."""
    if path is None:
        return _describe_fields(words, print_config=print_config, schema=schema, as_json=as_json)
    show_all_output()  # before the import of Ray
    from raysgd.declarative.args import as_values
    from raysgd.declarative.checking import check_names, load_tree

    check_flags(words, command)
    more = [] if grace is None else [f"--trainer.failure_config.stop_grace_s={grace}"]
    args, tree = load_tree(path, [*words, *more])
    if print_config:
        for text in check_names(args):
            get_logger().warning(text)
        _print_values(as_values(args), as_json)
        return SUCCEEDED
    from raysgd.declarative.entry import evaluate, export, train  # they import Ray

    found: dict[str, Any] = {}

    def run() -> None:
        given: dict[str, Any] = {"allow_import": list(allowed) or None}
        with tree.naming_places():
            if folder is not None:
                found["folder"] = export(args, folder, **given)
            else:
                found.update(train(args, **given) if stage is None else evaluate(args, stage, **given))

    status = run_to_end(ctx.find_root().obj, "training", run)
    if status != SUCCEEDED:
        return status
    if as_json:  # after the output of workers, so that these are the last lines
        print_json(found)
    else:
        for name, value in found.items():
            print(f"{name}: {value}")
    return status


def _describe_fields(words: Sequence[str], *, print_config: bool, schema: bool, as_json: bool) -> int:
    """Print what is known without a file.

    Raises:
        ConfigError: Nothing of that is asked for.
    """
    from raysgd.declarative.schema import list_defaults, make_schema

    if print_config and not words:
        _print_values(list_defaults(), as_json)
    elif schema:
        print_json(make_schema())
    else:
        file = next((word for word in words if word.endswith((".yaml", ".yml"))), "FILE")
        raise ConfigError(f"no file is given; give one with -f: raysgd train -f {file}.")
    return SUCCEEDED


def restart(words: Sequence[str], run_dir: str, changes: Sequence[str]) -> int:
    """Train again from the newest checkpoint of an earlier run; for `raysgd restore`.

    Args:
        words: The words after ``raysgd train`` of that run.
        run_dir: Its folder.
        changes: Flags that replace those of the run.
    """
    from raysgd.cli.main import main

    merged = ["train", *words, *changes, "--checkpoint.resume_from", run_dir]
    print_error(f"raysgd restore: raysgd {shlex.join(merged)}")
    return main(merged)


def check_flags(words: Sequence[str], command: click.Command) -> None:
    """Refuse a misspelt flag of the command, which would be taken for a field.

    Raises:
        ConfigError: A word is nearly a flag; the message names it.
    """
    import dataclasses

    from raysgd.declarative.args import TrainerArgs

    fields = [f"--{each.name}" for each in dataclasses.fields(TrainerArgs)]
    flags = [name for each in command.params for name in each.opts if name.startswith("--")]
    for word in words:
        name = word.partition("=")[0].rstrip("!")
        if not name.startswith("--") or f"--{name[2:].partition('.')[0].replace('-', '_')}" in fields:
            continue
        if (close := nearest(name, [*flags, *fields])) and close == nearest(name, flags):
            raise ConfigError(f"{name} is neither a flag nor a field{close}.")


def _print_values(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(values)
        return
    import yaml

    yaml.safe_dump(values, sys.stdout, sort_keys=False, default_flow_style=False)
