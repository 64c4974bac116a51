"""What editors and ``raysgd train --help`` show of a training's fields, from their declarations in `raysgd.declarative.args`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from raysgd._util.text import read_attributes
from raysgd.declarative import args
from raysgd.engine.config import EngineConfig

#: What may stand in place of any value.
_REFERENCE = {"type": "string", "pattern": r"\$[({]"}
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
        section["properties"][name] = {**about, "anyOf": [*given.pop("anyOf", [given]), _REFERENCE]}


def list_fields(schema: dict[str, Any], section: Any = None, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each field with what it may be, and its meaning with its default."""
    section = schema if section is None else section
    for name, field in section["properties"].items():
        if "deprecated" in field:
            continue
        kinds = [each for each in field["anyOf"] if each is not _REFERENCE]
        default = "" if field.get("default") in (None, {}, []) else f" (default: {json.dumps(field['default'])})"
        needed = " (needed)" if name in section.get("required", ()) else ""
        words = "|".join(dict.fromkeys(word for each in kinds for word in _words_of(each)))
        yield f"--{prefix}{name} {words}", f"{field['description']}{default}{needed}"
        for each in kinds:
            if "$ref" in each:
                inner = schema["$defs"][each["$ref"].rpartition("/")[2]]
                yield from list_fields(schema, inner.get("anyOf", [inner])[0], f"{prefix}{name}.")


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
