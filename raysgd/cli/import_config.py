"""``raysgd import-config FILE``: a file of another trainer as one of `raysgd train`. Driver side, without Ray and torch."""

from __future__ import annotations

from pathlib import Path

import click

from raysgd.cli.console import FAILED, SUCCEEDED, json_flag, print_error, print_json
from raysgd.declarative.importing.files import KINDS, as_yaml, import_config
from raysgd.errors import ConfigError


@click.command("import-config")
@click.argument("path", metavar="FILE")
@click.option("-o", "--output", metavar="FILE", help="Write the new file here (default: print it).")
@click.option("--from", "kind", type=click.Choice(list(KINDS)), help="Whose file it is (default: as its keys say).")
@click.option("--strict", is_flag=True, help="Exit with 1 if something is left to write by hand.")
@json_flag
def command(path: str, output: str | None, kind: str | None, strict: bool, as_json: bool) -> int:
    """Write a file for `raysgd train` from one of another trainer.

    These are YAML of Lightning's CLI, JSON of Hugging Face's TrainingArguments, and YAML of nnScaler. What is left to
    write by hand is listed apart from the file, each with the reason.
    """
    made = import_config(path, kind)
    text = as_yaml(made, path)
    if as_json:
        print_json({"values": made.values, "to_do": made.remarks, "not_needed": made.unused})
    if output is None and not as_json:
        print(text, end="")
    elif output is not None:
        try:
            Path(output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{output} cannot be written: {error.strerror}; give another file with -o.") from None
    for key, remark in [] if as_json else made.remarks:
        print_error(f"{key}: {remark}")
    for reason in [] if as_json else dict.fromkeys(made.unused.values()):
        keys = [key for key, each in made.unused.items() if each == reason]
        print_error(f"not needed: {', '.join(keys)}: {reason}.")
    return FAILED if strict and made.remarks else SUCCEEDED
