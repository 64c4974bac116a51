"""The flags of a command end where its script begins, and a mistake is answered with the right flag."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.cli.flags import Flag, format_help, parse_bool, parse_flags, parse_int, parse_number
from raysgd.errors import ConfigError, UnknownArgumentError

FLAGS = [
    Flag(name="--size", help="how many", parse=parse_int, metavar="N"),
    Flag(name="--rate", help="at 50% or more", parse=parse_number, metavar="NUMBER"),
    Flag(name="--name", help="text"),
    Flag(name="--loud", help="switch", parse=parse_bool, is_switch=True, metavar="true|false"),
    Flag(name="--env", help="pairs", may_repeat=True),
]
HINTS = {"--nproc-per-node": "give --size"}


def parse(*words: str) -> tuple[dict[str, Any], list[str]]:
    parsed = parse_flags(words, FLAGS, HINTS)
    assert not parsed.wants_help
    return parsed.values, parsed.remaining


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
        (("--env", "A=1", "--env", "B=2", "train.py"), {"--env": ["A=1", "B=2"]}, ["train.py"]),
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
    ("words", "error", "text"),
    [
        (("--sise", "3"), UnknownArgumentError, "--sise is not known (did you mean '--size'?)"),
        (("--SIZE", "3"), UnknownArgumentError, "did you mean '--size'?"),
        (("-q",), UnknownArgumentError, "-q is not known; flags of the script follow its name."),
        (("--nproc_per_node", "2"), UnknownArgumentError, "--nproc_per_node is not known: give --size."),
        (("--nproc-per-node=2",), UnknownArgumentError, "--nproc-per-node is not known: give --size."),
        (("--size",), ConfigError, "--size needs a value: --size N."),
        (("--size", "--rate", "2", "train.py"), ConfigError, "--size needs a value: --size N."),
        (("--size", "two", "train.py"), ConfigError, "--size two: 'two' is not an int."),
        (("--rate=x",), ConfigError, "--rate x: 'x' is not a number."),
        (("--loud=maybe",), ConfigError, "--loud maybe: give true or false."),
        (("--size=1", "--size=1"), ConfigError, "--size is given twice."),
    ],
)
def test_unusable_flag_is_refused(words: tuple[str, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        parse(*words)
    assert text in str(caught.value)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_asked_for_before_the_script(word: str) -> None:
    assert parse_flags(["--size", "3", word], FLAGS, HINTS).wants_help
    assert not parse_flags(["train.py", word], FLAGS, HINTS).wants_help


def test_help_lists_all_flags() -> None:
    text = format_help("raysgd test", "A test.", FLAGS)
    assert "usage: raysgd test" in text and "at 50% or more" in text
    assert all(flag.name in text for flag in FLAGS)
