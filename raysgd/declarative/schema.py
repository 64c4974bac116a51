"""What editors and ``raysgd train --help`` show of a training's fields, from their declarations in `raysgd.declarative.args`."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from raysgd._util.text import read_attributes
from raysgd.config.argument_names import nearest
from raysgd.declarative import args
from raysgd.declarative.values import Importer, entry_of
from raysgd.engine.config import EngineConfig
from raysgd.errors import ConfigError

#: What may stand in place of any value.
_REFERENCE = {"type": "string", "pattern": r"\$[({]"}
#: An empty section, mapping or list.
_EMPTY = {"type": "null"}
#: Arguments of components that the loop sets; for an optimizer and a scheduler it sets the first one.
_SET_BY_THE_LOOP = {
    "dataloader": ("dataset", "batch_size", "sampler", "batch_sampler"),
    "dataset_sampler": ("dataset", "num_replicas", "rank"),
}  # fmt: skip
_WORDS = {
    "array": "[...]", "boolean": "true|false", "integer": "N", "null": "none", "number": "NUMBER", "object": "{...}",
    "string": "TEXT",
}  # fmt: skip


def make_schema() -> dict[str, Any]:
    """Return the JSON schema of a training's file."""
    schema: dict[str, Any] = TypeAdapter(args.TrainerArgs).json_schema()
    sections = schema["$defs"]
    sections["EngineConfig"] = TypeAdapter(EngineConfig).json_schema() | {"additionalProperties": False}
    for name, section in sections.items():
        _describe(section, EngineConfig if name == "EngineConfig" else getattr(args, name))
        if "type" in section["properties"]:  # a component, which may be its class alone
            sections[name] = {"anyOf": [section, {"type": "string"}]}
    schema["properties"]["engine"] = {"$ref": "#/$defs/EngineConfig"}
    _describe(schema, args.TrainerArgs)
    for name, why in args.NOT_NEEDED.items():
        section, _, key = name.rpartition(".")
        owner = {"": schema, "compute_config": sections["ComputeConfig"], "model": sections["ModelConfig"]["anyOf"][0]}[
            section
        ]
        owner["properties"][key] = {"deprecated": True, "description": f"Not needed: {why}."}
    return schema | {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "raysgd train"}


def _describe(section: dict[str, Any], kind: type) -> None:
    section["description"] = str(kind.__doc__).partition("\n")[0]
    texts = read_attributes(kind.__doc__)
    for name, given in section["properties"].items():
        about = {"description": texts.get(name, "")}
        if "default" in given:
            about["default"] = given.pop("default")
        kinds = given.pop("anyOf", [given])
        may_be_empty = any(each.get("type") in ("object", "array") or "$ref" in each for each in kinds)
        also = [_EMPTY] if may_be_empty and {"type": "null"} not in kinds else []
        section["properties"][name] = {**about, "anyOf": [*kinds, *also, _REFERENCE]}


def list_fields(schema: dict[str, Any], section: Any = None, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each field with what it may be, and its meaning with its default."""
    section = schema if section is None else section
    for name, field in section["properties"].items():
        if "deprecated" in field:
            continue
        kinds = [each for each in field["anyOf"] if each is not _REFERENCE and each is not _EMPTY]
        default = "" if field.get("default") in (None, {}, []) else f" (default: {json.dumps(field['default'])})"
        needed = " (needed)" if name in section.get("required", ()) else ""
        words = "|".join(dict.fromkeys(word for each in kinds for word in _words_of(each)))
        yield f"--{prefix}{name} {words}", f"{field['description']}{default}{needed}"
        for each in kinds:
            if "$ref" in each:
                inner = schema["$defs"][each["$ref"].rpartition("/")[2]]
                yield from list_fields(schema, inner.get("anyOf", [inner])[0], f"{prefix}{name}.")


def list_help(name: str, values: Mapping[str, Any], importer: Importer) -> Iterator[tuple[str, str]]:
    """Yield a field and those in it, or the arguments of a component's class for a name such as ``model.args``.

    Args:
        name: The field.
        values: Values of a training, which say what the class is.
        importer: Imports the class.

    Raises:
        ConfigError: There is no such field, or the class is not known.
    """
    *owner, key = name.replace("-", "_").split(".")
    if owner and key.endswith("args") and owner[0] not in ("trainer", "engine"):
        yield from _list_arguments(".".join([*owner, key]), owner, values, importer)
        return
    fields = [(flag, text) for flag, text in list_fields(make_schema())]
    names = [flag.partition(" ")[0][2:] for flag, _ in fields]
    plain = ".".join([*owner, key])
    if plain not in names:
        raise ConfigError(f"--help {name}: there is no such field{nearest(plain, names)}.")
    yield from (field for field, each in zip(fields, names, strict=True) if f"{each}.".startswith(f"{plain}."))


def _list_arguments(
    name: str, owner: list[str], values: Mapping[str, Any], importer: Importer
) -> Iterator[tuple[str, str]]:
    section: Any = values
    default: Any = list_defaults()
    for part in owner:
        section, default = entry_of(section, part), entry_of(default, part)
    kind = section if isinstance(section, str) else entry_of(section, "type") or entry_of(default, "type")
    if kind is None:
        raise ConfigError(
            f"--help {name}: the class is not known; give -f FILE or --{'.'.join(owner)} CLASS before it."
        )
    made = importer.load(kind)
    try:
        parameters = list(inspect.signature(made).parameters.values())
    except (TypeError, ValueError):
        raise ConfigError(f"--help {name}: {kind} does not say which arguments it takes.") from None
    texts = read_attributes(made.__doc__, "Args") or read_attributes(getattr(made, "__init__", made).__doc__, "Args")
    for each in parameters[1:] if owner[0] in ("optimizer", "lr_scheduler") else parameters:
        if each.name in _SET_BY_THE_LOOP.get(owner[0], ()):
            continue
        is_needed = each.default is each.empty
        word = "VALUE" if each.annotation is each.empty else inspect.formatannotation(each.annotation)
        kinds: dict[Any, str] = {each.VAR_KEYWORD: "further arguments", each.VAR_POSITIONAL: "cannot be given"}
        further = kinds.get(each.kind)
        after = further or ("needed" if is_needed else f"default: {each.default!r}")
        text = texts.get(each.name, "")
        says_default = after.startswith("default") and "default" in text.lower()
        yield f"--{name}.{each.name} {word.strip(chr(39))}", text if says_default else f"{text} ({after})".strip()


def _words_of(kind: dict[str, Any]) -> list[str]:
    return [*map(str, kind["enum"])] if "enum" in kind else [kind.get("const") or _WORDS[kind.get("type", "object")]]


def list_defaults(kind: Any = args.TrainerArgs) -> dict[str, Any]:
    """Return all fields with their defaults; None for those that have to be given."""
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for each in dataclasses.fields(kind):
        if each.default_factory is not dataclasses.MISSING:
            found[each.name] = args.as_values(each.default_factory())
        elif each.default is not dataclasses.MISSING:
            found[each.name] = args.as_values(each.default)
        else:
            found[each.name] = list_defaults(hints[each.name]) if dataclasses.is_dataclass(hints[each.name]) else None
    return found
