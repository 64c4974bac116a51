"""Values of components' arguments: full names, ``__type``, ``__value_type``, guessed types, allowed modules."""

from __future__ import annotations

import datetime
import os.path
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from raysgd.declarative.checking import explain_missing
from raysgd.declarative.values import Importer, guess
from raysgd.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3", 3),
        ("1e-3", 0.001),
        ("true", True),
        ("None", None),
        ("null", None),
        ("[1, 'a']", [1, "a"]),
        ("a.b", "a.b"),
        ("", ""),
        ({"__value_type": "str", "value": "1"}, "1"),
        ({"__value_type": "float", "value": 1}, 1.0),
        ({"__value_type": "function", "value": "os.path.join"}, os.path.join),
        ({"__type": "datetime.timedelta", "days": "2", "hours": 1}, datetime.timedelta(days=2, hours=1)),
        ([{"a": ["1"]}], [{"a": [1]}]),
        (2.5, 2.5),
    ],
)
def test_values_stand_for_objects(written: Any, value: Any) -> None:
    assert Importer().resolve(written) == value


@hypothesis.given(st.text())
def test_any_text_can_be_guessed(text: str) -> None:
    guess(text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda importer: importer.load("Adam"), "'Adam' is not the full name"),
        (lambda importer: importer.load("os.path.joint"), r"os.path has no 'joint' \(did you mean 'join'"),
        (lambda importer: importer.load("no_such.Thing"), "there is no module 'no_such'"),
        (lambda importer: importer.build("os.sep", {}), "os.sep is not callable"),
        (lambda importer: importer.build("datetime.timedelta", {"dayz": 1}), "cannot be called with dayz"),
        (lambda importer: importer.resolve({"__value_type": "int", "value": "x"}), "'x' cannot be made int"),
        (lambda importer: importer.resolve({"__value_type": "int"}), "needs exactly one other key, 'value'"),
        (lambda importer: importer.resolve({"__value_type": "inte", "value": 1}), "inte is not a type"),
    ],
)
def test_what_cannot_be_made_is_refused(call: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call(Importer())


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        (str, "123", "123"), (str | None, "123", "123"), (str | None, "null", None), (None | str, "1e4", "1e4"),
        (str | list[str], "123", "123"), (str | int, "123", 123), (str | float, "1", 1), (str | bool, "True", True),
        (list[str], ["1", "a"], ["1", "a"]), (list[str] | None, ["1"], ["1"]), (Sequence[str], ["1"], ["1"]),
        (tuple[str, ...], ["1"], ["1"]), (dict[str, str], {"a": "1"}, {"a": "1"}), (dict[str, int], {"a": "1"}, {"a": 1}),
        (dict[str, list[str]], {"a": ["1"]}, {"a": ["1"]}), (Any, "1", 1), (int, "1", 1), (None, "12e4567", "12e4567"),
    ],
)  # fmt: skip
def test_a_text_is_a_literal_unless_the_annotation_has_texts(
    kind: Any, written: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(x: Any) -> Any:
        return x

    take.__annotations__ = {} if kind is None else {"x": kind}
    monkeypatch.setattr(sys.modules[__name__], "take", take, raising=False)
    found = Importer().build(f"{__name__}.take", {"x": written})
    assert repr(found) == repr(value)


def test_imports_can_be_limited() -> None:
    importer = Importer(["os.path", "datetime"])
    assert importer.load("os.path.join") is os.path.join
    for name in ("os.system", "os.pathology.join", "subprocess.run"):
        with pytest.raises(ConfigError, match=f"{name} may not be imported: --allow-import allows os.path, datetime"):
            importer.load(name)
    with pytest.raises(ConfigError, match="may not be imported"):
        importer.resolve({"__type": "subprocess.Popen", "args": "true"})
    with pytest.raises(ConfigError, match="may not be imported"):
        importer.resolve({"__value_type": "function", "value": "os.system"})


def test_a_builtin_function_is_not_a_value_type() -> None:
    with pytest.raises(ConfigError, match="eval is not a type"):
        Importer(["my"]).resolve({"__value_type": "eval", "value": "1 + 1"})


def test_an_import_that_fails_inside_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module_of_test.py").write_text("import no_such_module_of_test\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match="the import of broken_module_of_test failed: No module named 'no_such_module_of"
    ):
        Importer().load("broken_module_of_test.Model")
    sys.modules.pop("broken_module_of_test", None)


def test_an_error_inside_a_component_is_its_own() -> None:
    with pytest.raises(TypeError, match="unsupported type for timedelta"):
        Importer().build("support.declared.fail_inside", {})


@pytest.mark.parametrize("name", ["torch.os.system", "torch.optim.sgd.torch.os.system"])
def test_modules_inside_of_an_allowed_one_need_to_be_allowed_too(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} may not be imported: --allow-import allows torch"):
        Importer(["torch"]).load(name)
    assert Importer(["torch"]).load("torch.optim.Adam").__name__ == "Adam"


@pytest.mark.parametrize(
    "value", [{"__type": 5}, {"__value_type": 5, "value": 1}, {"__value_type": "function", "value": 3}]
)
def test_a_name_that_is_not_a_text_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not"):
        Importer().resolve(value)


@pytest.mark.parametrize(
    ("source", "name", "text"),
    [
        ("class Line: pass", "parts.Lien", r"parts.Lien: parts has no 'Lien' \(did you mean 'Line'\?\)\."),
        ("class Line: pass", "parts.models.Line", "parts.models.Line: parts has no 'models'"),
        ("class Line: pass", "parts.Line", None),
        ("class Line: pass", "parts.Line.Inner", None),
        ("class Line: pass", "parts.__name__", None),
        (
            "class Line:\n    def count(self): return len(self.modules())",
            "parts.Lien",
            "parts.Lien: parts has no 'Lien'",
        ),
        ("import torch.nn as Lien", "parts.Lien", None),
        ("from torch.nn import Linear as Lien", "parts.Lien", None),
        ("from torch.nn import *", "parts.Lien", None),
        ("def __getattr__(name): return print", "parts.Lien", None),
        ("globals()['Lien'] = print", "parts.Lien", None),
        ("import sys; setattr(sys.modules[__name__], 'Lien', print)", "parts.Lien", None),
        ("def define():\n    global Lien\n    Lien = print", "parts.Lien", None),
        ("for Lien in (1,): pass", "parts.Lien", None),
        ("with open(__file__) as Lien: pass", "parts.Lien", None),
        ("match 3:\n    case int() as Lien: pass", "parts.Lien", None),
        ("# Lien is gone", "parts.Lien", None),
        ("class Line: ...  # model.eval()", "parts.Lien", "parts.Lien: parts has no 'Lien'"),
    ],
)
def test_a_name_that_a_source_does_not_have_is_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str, text: str | None
) -> None:
    (tmp_path / "parts.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found = explain_missing(name)
    if text is None:
        assert found is None
    else:
        assert re.match(text, found or "")
    assert "parts" not in sys.modules


def test_names_in_packages_are_found_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package" / "plain").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("from package.models import Line")
    (tmp_path / "package" / "models.py").write_text("class Line: pass")
    monkeypatch.syspath_prepend(tmp_path)
    assert not any(
        map(explain_missing, ("package.Line", "package.models.Line", "package.models", "package.plain.Line"))
    )
    assert str(explain_missing("package.models.Lien")).startswith("package.models.Lien: package.models has no 'Lien'")
    assert str(explain_missing("package.modles.Line")).startswith("package.modles.Line: package has no 'modles'")
    assert "package" not in sys.modules
    assert explain_missing("no_such_module.Line") is explain_missing("__main__.Line") is None


@pytest.mark.parametrize(
    "name",
    [
        "torch.optim.Adam",
        "torch.optim.lr_scheduler.StepLR",
        "torch.utils.data.DataLoader",
        "torch.nn.Linear",
        "torch.tensor",
    ],
)
def test_what_torch_has_is_not_missing(name: str) -> None:
    assert explain_missing(name) is None
