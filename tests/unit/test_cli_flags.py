"""The flags of a command end where its script begins, and a mistake is answered with the right flag."""

from __future__ import annotations

from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.cli.flags import Flag, FlagsCommand

FLAGS = [
    Flag("--size", help="how many", parse=click.INT, metavar="N"),
    Flag("--rate", help="at 50% or more", parse=click.FLOAT, metavar="NUMBER"),
    Flag("--name", help="text"),
    Flag("--loud", help="switch", parse=click.BOOL, is_switch=True, metavar="true|false"),
    Flag("--env", help="pairs", may_repeat=True),
]
HINTS = {"--nproc-per-node": "give --size"}


COMMAND = FlagsCommand(
    "test",
    hints=HINTS,
    advice="flags of the script follow its name",
    params=[*FLAGS, click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
    help="A test.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def parse(*words: str) -> tuple[dict[str, Any], list[str]]:
    with COMMAND.make_context("test", list(words)) as ctx:
        return COMMAND.given(ctx), list(ctx.params["words"])


@pytest.mark.parametrize(
    ("words", "values", "remaining"),
    [
        ((), {}, []),
        (("train.py",), {}, ["train.py"]),
        (("--size", "3", "--rate=0.5", "train.py"), {"--size": 3, "--rate": 0.5}, ["train.py"]),
        (("--name", "--odd", "train.py"), {"--name": "--odd"}, ["train.py"]),
        (("--name=a=b", "train.py"), {"--name": "a=b"}, ["train.py"]),
        (("--loud", "train.py"), {"--loud": True}, ["train.py"]),
        (("--loud", "false", "train.py"), {"--loud": False}, ["train.py"]),
        (("--loud=TRUE", "true"), {"--loud": True}, ["true"]),
        (("--env", "A=1", "--env", "B=2", "train.py"), {"--env": ("A=1", "B=2")}, ["train.py"]),
        (("--size", "3", "--", "--train.py", "--size", "4"), {"--size": 3}, ["--train.py", "--size", "4"]),
    ],
)
def test_flags_end_at_the_script(words: tuple[str, ...], values: dict[str, Any], remaining: list[str]) -> None:
    assert parse(*words) == (values, remaining)


@given(st.lists(st.sampled_from(["--size", "--loud", "--help", "--unknown", "-x", "--", "3", "a b", "--size=4", ""])))
def test_words_after_the_script_are_passed_on_as_they_are(words: list[str]) -> None:
    assert parse("--size", "1", "train.py", *words) == ({"--size": 1}, ["train.py", *words])


@given(st.integers(), st.floats(allow_nan=False), st.booleans())
def test_values_are_parsed_as_they_were_written(size: int, rate: float, loud: bool) -> None:
    words = [f"--size={size}", "--rate", str(rate), "--loud", str(loud), "train.py"]
    assert parse(*words) == ({"--size": size, "--rate": rate, "--loud": loud}, ["train.py"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--sise", "3"), "--sise is not known (did you mean '--size'?)"),
        (("--SIZE", "3"), "did you mean '--size'?"),
        (("-q",), "-q is not known; flags of the script follow its name."),
        (("--nproc_per_node", "2"), "--nproc_per_node is not known: give --size."),
        (("--nproc-per-node=2",), "--nproc-per-node is not known: give --size."),
        (("--size",), "--size needs a value: --size N."),
        (("--size", "--rate", "2", "train.py"), "--size needs a value: --size N."),
        (("--size", "two", "train.py"), "'--size': 'two' is not a valid integer."),
        (("--rate=x",), "'--rate': 'x' is not a valid float."),
        (("--loud=maybe",), "'--loud': 'maybe' is not a valid boolean."),
        (("--size=1", "--size=1"), "--size is given twice."),
    ],
)
def test_unusable_flag_is_refused(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        parse(*words)
    assert text in caught.value.format_message()


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_asked_for_before_the_script(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMAND.main(["--size", "3", word], "test", standalone_mode=False) == 0
    shown = capsys.readouterr().out
    assert "A test." in shown and "at 50% or more" in shown
    assert all(flag.flag in shown for flag in FLAGS)
    assert parse("train.py", word) == ({}, ["train.py", word])


def test_shell_completes_an_unfinished_line() -> None:
    with COMMAND.make_context("test", ["--size"], resilient_parsing=True) as ctx:
        assert [item.value for item in COMMAND.shell_complete(ctx, "--lo")] == ["--loud"]
