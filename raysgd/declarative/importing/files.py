"""Read a file of another trainer, find out whose it is, and make of it values that `raysgd train` takes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from raysgd.declarative.args import TrainerArgs
from raysgd.declarative.checking import check_names
from raysgd.declarative.fields import FieldError
from raysgd.declarative.importing import hugging_face, lightning
from raysgd.declarative.importing.rules import Rule, Translation, flatten, translate
from raysgd.declarative.reading import Tree, pop_not_needed
from raysgd.declarative.strategies import engine_fields
from raysgd.declarative.values import BOOL_WORDS, Importer, read_plain
from raysgd.errors import ConfigError

_FIELDS = {name: Rule(lambda made, key, value: made.set(key, value)) for name in TrainerArgs.__dataclass_fields__}
#: The kinds of files: the rules by which one is known, and what translates it.
KINDS: dict[str, tuple[Mapping[str, Rule], Callable[[Mapping[str, Any]], Translation]]] = {
    "lightning": (lightning.RULES, lightning.translate_file),
    "hf": (hugging_face.RULES, partial(translate, rules=hugging_face.RULES)),
    "nnscaler": (_FIELDS, lambda values: Translation({}, dict(values))),
}


def import_config(path: str | os.PathLike[str], kind: str | None = None) -> Translation:
    """Translate a file of another trainer.

    Args:
        path: The file: YAML or JSON.
        kind: One of `KINDS`. None: the one that most of the keys are of.

    Returns:
        The translation, whose values `raysgd.declarative.load_args` takes.

    Raises:
        ConfigError: The file cannot be read, or it is not known whose it is.
    """
    values = _read(os.fspath(path))
    kind = detect(values, os.fspath(path)) if kind is None else kind
    made = KINDS[kind][1](values)
    made.values = _escaped(made.values) if kind != "nnscaler" else made.values
    _leave_out_refused(made)
    return made


def detect(values: Mapping[str, Any], path: str) -> str:
    """Return the kind of file whose keys most of these are.

    Raises:
        ConfigError: None of the keys is known.
    """
    if any(isinstance(values.get(name), Mapping) for name in ("fit", "validate", "test", "predict")):
        return "lightning"
    known = {kind: sum(key in rules for key, _ in flatten(values, rules)) for kind, (rules, _) in KINDS.items()}
    # Lightning's parts have a class_path, those of nnScaler a type.
    known["lightning"] += len(re.findall(r"'class_path':", str(values)))
    known["nnscaler"] += len(re.findall(r"'type':", str(values)))
    best = max(known, key=lambda kind: known[kind])
    if not known[best]:
        raise ConfigError(f"{path}: it is not known whose file this is; give --from with one of {', '.join(KINDS)}.")
    return best


def _leave_out_refused(made: Translation) -> None:
    """Leave out the values that raysgd refuses, each with a remark that says why.

    Raises:
        ConfigError: A value that has to be there is refused or missing.
    """
    tree = Tree(made.values)
    made.unused |= pop_not_needed(tree.values)
    while True:
        try:
            args = TrainerArgs(**tree.resolved())
            check_names(args)
            engine_fields(args, Importer())
            return
        except FieldError as error:
            if not _drop(tree.values, error.path):
                raise ConfigError(f"{'.'.join(error.path)}: {error}") from None
            made.remark(".".join(error.path), f"it is left out, as raysgd refuses it: {error}")


def _drop(values: Any, path: tuple[str, ...]) -> bool:
    """Remove the value at a path, or what is the deepest on the way to it; return whether there was one."""
    *sections, key = path or ("",)
    for section in sections:
        inside = values.get(section) if isinstance(values, dict) else None
        if not isinstance(inside, (dict, list)):
            key = section
            break
        values = inside
    if isinstance(values, list):
        values[:] = [each for place, each in enumerate(values) if str(place) != key]
        return True
    return values.pop(key, _drop) is not _drop


def _escaped(value: Any) -> Any:
    """Return values whose texts stand for themselves in a file of `raysgd train`."""
    if isinstance(value, Mapping):
        return {key: _escaped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    return re.sub(r"\$(?=[({])", "$$", value) if isinstance(value, str) else value


# -- files -----------------------------------------------------------------------------------------------------------------


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = _parse(text, Path(path).suffix)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        text = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ConfigError(f"{path} cannot be read: {text}.") from None
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path} has no names with values; give the file of a training.")
    return values


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".json":
        return json.loads(text)
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Reads YAML 1.1 as PyYAML does, with ``yes`` as a bool, but ``1e-4`` is a number and a date is a text."""

    def resolve(self, kind: type, value: Any, implicit: Any) -> Any:
        """Return the tag of a value that has none in the text."""
        if kind is yaml.ScalarNode and implicit[0] and value != "<<":
            return "!plain"
        return super().resolve(kind, value, implicit)


_Loader.add_constructor("!plain", lambda loader, node: BOOL_WORDS.get(node.value.lower(), read_plain(node.value)))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes texts in quotes where `raysgd train` would read something else without them."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return whether a value that occurs twice is written twice."""
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if read_plain(text) != text or text.lower() in BOOL_WORDS else None
    ),
)


def as_yaml(made: Translation, source: str) -> str:
    """Return the file of `raysgd train`, whose first lines say what it was made of and what is left to do."""
    lines = [
        f"# From {os.path.basename(source)}, by `raysgd import-config`.",
        *(f"# To do: {key}" for key, _ in made.remarks),
    ]
    ordered = {name: made.values[name] for name in _FIELDS if name in made.values}
    written: str = yaml.dump(
        ordered, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120
    )
    return "\n".join(lines) + "\n" + written
