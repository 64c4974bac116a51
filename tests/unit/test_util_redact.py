"""Secrets stay out of what is written down; what only looks like one stays readable."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raysgd._util.redact import (
    REDACTED,
    is_secret_name,
    plain,
    redact,
    redact_arguments,
    redact_text,
    redact_texts,
    redact_uri,
    secret_values,
)

SECRET = "hunter2-x9"
SECRET_NAMES = [
    "password",
    "Password",
    "db_password",
    "PASSWD",
    "passphrase",
    "secret",
    "client_secret",
    "AWS_SECRET_ACCESS_KEY",
    "api_key",
    "apikey",
    "api-key",
    "OPENAI_API_KEY",
    "access_key",
    "private_key",
    "token",
    "hf_token",
    "HF_TOKEN",
    "auth-token",
    "accessToken",
    "token_file",
    "credentials",
    "credential",
]
PLAIN_NAMES = [
    "tokenizer",
    "tokenizer_name",
    "num_tokens",
    "max_tokens_per_batch",
    "tokens",
    "numTokens",
    "Tokenizer",
    "keyboard",
    "key",
    "monkey",
    "lr",
    "pass_through",
    "author",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", [*PLAIN_NAMES, 3, None, ("password",)])
def test_names_that_are_not_secrets(name: Any) -> None:
    assert not is_secret_name(name)


# -- configs -----------------------------------------------------------------------------------------------------------


def test_secrets_are_replaced_at_any_depth() -> None:
    config = {
        "lr": 0.1,
        "wandb": {"api_key": SECRET, "project": "p"},
        "stores": [{"name": "a", "password": SECRET}, ("x", {"token": SECRET})],
        "credentials": {"user": "u", "parts": [SECRET]},
        "tokenizer": "bert",
        "num_tokens": 512,
    }
    shown = redact(config)
    assert SECRET not in json.dumps(shown)
    assert shown == {
        "lr": 0.1,
        "wandb": {"api_key": REDACTED, "project": "p"},
        "stores": [{"name": "a", "password": REDACTED}, ["x", {"token": REDACTED}]],
        "credentials": REDACTED,
        "tokenizer": "bert",
        "num_tokens": 512,
    }


def test_redact_does_not_change_its_argument() -> None:
    config = {"inner": {"password": SECRET}}
    redact(config)
    assert config == {"inner": {"password": SECRET}}


def test_plain_converts_other_objects_without_secrets() -> None:
    @dataclass
    class Settings:
        api_key: str
        lr: float

    shown = redact(plain({"settings": Settings(SECRET, 0.1), "path": Path("/data"), 3: {"password": SECRET}}))
    assert SECRET not in json.dumps(shown)
    assert shown["path"] == "PosixPath('/data')"
    assert "lr=0.1" in shown["settings"]
    assert shown["3"] == {"password": REDACTED}


def test_plain_cuts_long_texts_and_deep_trees() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert len(json.dumps(plain({"loop": loop, "large": object(), "array": ["x" * 10_000]}))) < 20_000
    assert len(plain({"x": {i: i for i in range(3)}.keys()})["x"]) <= 200


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"password={SECRET}",
        f"password = '{SECRET}'",
        f'connect(host="h", password="{SECRET}")',
        f"{{'api_key': '{SECRET}', 'x': 1}}",
        f'{{"api_key": "{SECRET}"}}',
        f"token: {SECRET}",
        f"HF_TOKEN={SECRET} python train.py",
        f"--api-key {SECRET}",
        f"--api-key={SECRET}",
        f"train.py --password  '{SECRET} with blanks' --lr 0.1",
        f"Config(db_password={SECRET}, lr=0.1)",
        f"accessToken={SECRET}",
    ],
)
def test_value_assigned_to_a_secret_name_is_replaced(text: str) -> None:
    shown = redact_text(text)
    assert SECRET not in shown and REDACTED in shown


def test_text_around_a_secret_stays() -> None:
    assert redact_text(f'f(user="u", password="{SECRET}", lr=0.1)') == 'f(user="u", password=***, lr=0.1)'
    assert redact_text(f"a\npassword={SECRET}\nb") == "a\npassword=***\nb"
    assert redact_text(f"train.py --token {SECRET} --lr 0.1") == "train.py --token *** --lr 0.1"


@pytest.mark.parametrize(
    "text",
    [
        "tokenizer = AutoTokenizer.from_pretrained('bert')",
        "num_tokens=512, max_tokens: 1024",
        "KeyError: 'monkey'",
        'File "train.py", line 3, in train_func',
        "the password was wrong",
        "--tokens 5",
        "",
    ],
)
def test_text_without_secrets_is_left_as_it_is(text: str) -> None:
    assert redact_text(text) == text


def test_the_secrets_of_a_config_are_found_in_any_text() -> None:
    config = {
        "api_key": SECRET,
        "inner": [{"token": "t0ken-value"}],
        "credentials": {"user": "somebody", "keys": ["first-key", "second-key"]},
        "password": "abc",  # short: it would be found in the middle of words
        "tokenizer": "bert-base",
        "api_keys": ["third-key"],
    }
    secrets = secret_values(config)
    assert secrets == {SECRET, "t0ken-value", "somebody", "first-key", "second-key", "third-key"}
    text = redact_text(f"GET https://host/?k={SECRET} with second-key and bert-base", secrets)
    assert text == "GET https://host/?k=*** with *** and bert-base"


def test_secret_that_contains_another_is_replaced_whole() -> None:
    assert redact_text("long-secret-value", {"secret", "long-secret-value"}) == "***"


def test_a_traceback_shows_no_secret() -> None:
    config = {"api_key": SECRET}

    def connect(api_key: str) -> None:
        raise ConnectionError(f"401 for {api_key}")

    try:
        connect(api_key=config["api_key"])
    except ConnectionError as error:
        text = redact_text("".join(traceback.format_exception(error)), frozenset(secret_values(config)))
    assert SECRET not in text
    assert "ConnectionError: 401 for ***" in text and "test_util_redact.py" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://KEY:SECRET@bucket/runs", "s3://***@bucket/runs"),
        ("could not read s3://KEY:p@ss@bucket/a: denied", "could not read s3://***@bucket/a: denied"),
        ("'postgres://u:p@h', https://t0ken@host/x?y=a@b", "'postgres://***@h', https://***@host/x?y=a@b"),
        ("s3://bucket/user@home and mail to me@host", "s3://bucket/user@home and mail to me@host"),
        ("file:///data/@old", "file:///data/@old"),
    ],
)
def test_user_part_of_a_uri_is_replaced(text: str, shown: str) -> None:
    assert redact_uri(text) == redact_text(text) == shown
    assert redact({"storage": [text]}) == {"storage": [shown]}


def test_redact_texts_keeps_names_and_redacts_texts() -> None:
    tree = {"kind": "done", "data": {"message": f"401 for {SECRET}", "metrics": {"token_accuracy": 0.5}}}
    shown = redact_texts(tree, {SECRET, "done"}, untouched=("kind",))
    assert shown == {"kind": "done", "data": {"message": "401 for ***", "metrics": {"token_accuracy": 0.5}}}


def test_long_text_is_redacted_fast() -> None:
    started = time.thread_time()
    redact_text("a-" * 100_000)
    assert time.thread_time() - started < 1


# -- command lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["train.py", "--token", SECRET, "--lr", "0.1"], ["train.py", "--token", "***", "--lr", "0.1"]),
        (["train.py", f"--token={SECRET}"], ["train.py", "--token=***"]),
        (["train.py", "--use-token", "--lr", "0.1"], ["train.py", "--use-token", "--lr", "0.1"]),
        (["train.py", f"api_key={SECRET}", "tokens=5"], ["train.py", "api_key=***", "tokens=5"]),
        ([], []),
    ],
)
def test_a_command_line_shows_no_secret(arguments: list[str], shown: list[str]) -> None:
    assert redact_arguments(arguments) == shown
