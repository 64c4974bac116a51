"""What the fields of a training are made of: kinds of values, which pydantic reads and checks, and errors that name the field."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, ErrorDetails

from raysgd._util.text import with_article
from raysgd.config.argument_names import nearest
from raysgd.declarative.values import NO_FULL_NAME, read_none, read_settings, read_value
from raysgd.errors import ConfigError, UnknownArgumentError

T = TypeVar("T")


class FieldError(ConfigError):
    """A field has a value that cannot work.

    Attributes:
        path: The names that lead to the field, such as ``("checkpoint", "save_type")``.
        text: The message without the place.
    """

    def __init__(self, path: tuple[str, ...], text: str, place: str = "") -> None:
        super().__init__(f"{place}: {text}" if place else text)
        self.path, self.text, self._place = path, text, place

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.text, self._place)


class UnknownFieldError(FieldError, UnknownArgumentError):
    """There is no field of this name."""


@contextlib.contextmanager
def of_field(*path: str, names: Collection[str] = ()) -> Iterator[None]:
    """Make an error of the block one of a field, or of that one of the fields in it which the message names first."""
    try:
        yield
    except ConfigError as error:
        known = {name.replace("-", "_"): name for name in names}
        named = [known[word] for word in re.findall(r"\w+", str(error)) if word in known]
        kind = UnknownFieldError if isinstance(error, UnknownArgumentError) else FieldError
        raise kind((*path, *named[:1]), str(error)) from None


# -- kinds of values -------------------------------------------------------------------------------------------------------


def _check_path(path: str, info: ValidationInfo) -> str:
    if (found := re.search(r"\$\{?(\w+)\}?", path)) is not None:
        raise ConfigError(
            f"{info.field_name}={path!r} has {found[0]}, which is not resolved: write ${{{found[1]}}} in a file or on the "
            "command line."
        )
    return path


Bool = Annotated[bool, Field(strict=True), BeforeValidator(read_value)]
Count = Annotated[int, Field(strict=True, ge=1), BeforeValidator(read_value)]
Seed = Annotated[int, Field(strict=True, ge=0), BeforeValidator(read_value)]
Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False), BeforeValidator(read_value)]
Text = Annotated[str, Field(min_length=1)]
Path = Annotated[Text, AfterValidator(_check_path)]
#: The full name of a class or function.
FullName = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)+$")]
#: Arguments of a component, whose texts are read when it is made.
Args = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if read_none(value) is None else value)]
#: Values that nothing else reads.
Settings = Annotated[Args, BeforeValidator(read_settings)]
List = Annotated[list[T], BeforeValidator(lambda value: [] if read_none(value) is None else value)]
Maybe = Annotated[T | None, BeforeValidator(read_none)]

#: What is said of a value, by the type of pydantic's error.
_SENTENCES = {
    "bool_type": "is not a bool; give true or false.",
    "dict_type": "is not a mapping of argument names to values.",
    "finite_number": "is out of range; give a finite number.",
    "float_type": "is {kind}; give a number.",
    "greater_than_equal": "is too small; give {ge} or more.",
    "int_type": "is {kind}; give an int.",
    "list_type": "is not a list; give [{given}].",
    "literal_error": "is not known; give {expected}{close}.",
    "string_pattern_mismatch": f"{NO_FULL_NAME[:-1]}{{close}}.",
    "string_type": "is {kind}; give a text.",
}


def _explain(errors: list[ErrorDetails]) -> FieldError:
    """Return the error of a field for those of pydantic; of the alternatives of a field, for the one that is nearest."""
    error = max((each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]), key=lambda each: len(each["loc"]))
    value, context = error["input"], dict(error.get("ctx", {}))
    is_key = error["loc"][-1:] == ("[key]",)
    path = tuple(
        str(each) for each in error["loc"] if not re.search(r"^[A-Z]|[-\[]", str(each))
    )  # without alternatives
    cause = context.get("error")
    if cause is not None:
        kind = type(cause) if isinstance(cause, FieldError) else FieldError
        return kind((*path, *getattr(cause, "path", ())), str(cause))
    name = path[-2 if is_key else -1]
    if error["type"] == "missing":
        return FieldError(path, f"{name} is missing; give the full name of a class or function, such as my.{path[0]}.")
    if value in (None, "", {}):
        return FieldError(path, f"{name} is empty; give a value, or leave it out.")
    expected = [str(each.get("ctx", {}).get("expected")) for each in errors if each["loc"][:1] == error["loc"][:1]]
    close = nearest(value, re.findall(r"'([^']*)'", " ".join(expected)))
    sentence = _SENTENCES.get(error["type"], "cannot be used: {msg}.")
    context |= {"kind": with_article(type(value).__name__), "close": close, "msg": error["msg"], "given": value}
    return FieldError(path, f"{name}={value!r} {sentence.format(**context)}")


class _Explained(type):
    """Makes objects of a class, with errors that say which field is wrong."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise _explain(error.errors(include_url=False)) from None


CONFIG = ConfigDict(extra="forbid", defer_build=True)


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Section(metaclass=_Explained):
    """Fields of a training, as a frozen dataclass.

    Attributes:
        FURTHER: Where names stand that are neither fields nor those of a section in it.
    """

    FURTHER: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        """Check that all fields exist; a component may be written as its class alone."""
        if isinstance(given, cls):
            return given
        given = (given.kwargs or {}) if isinstance(given, ArgsKwargs) else read_none(given)
        values = {} if given is None else given
        known = [each.name for each in dataclasses.fields(cls)]
        if isinstance(values, str) and "type" in known:
            return {"type": values}
        if not isinstance(values, Mapping):
            also = " or the full name of a class" if "type" in known else ""
            raise FieldError((), f"{values!r} is not a mapping of names to values{also}.")
        for name in values:
            if name not in known:
                raise UnknownFieldError((str(name),), f"there is no such field{cls._suggest(str(name), known)}.")
        return values

    @classmethod
    def _suggest(cls, name: str, known: list[str]) -> str:
        """Return a hint to the nearest field, which may be in a section, or else to the arguments of a component."""
        longer: dict[str, str] = {}
        for section, kind in get_type_hints(cls, include_extras=True).items():
            for inner in _sections_of(kind):
                for each in dataclasses.fields(inner):
                    longer[each.name] = f"{section}.{each.name}" if each.name not in longer else each.name
        of_args = {name: f"args.{name}"} if "args" in known else {}
        names = {**of_args, **cls.FURTHER, **longer, **{each: each for each in known}}
        close = (
            nearest(name, longer, cutoff=1)
            or nearest(name, known, cutoff=0.75)
            or nearest(name, {**longer, **dict.fromkeys(known)})
            or nearest(name, {**of_args, **cls.FURTHER})
        )
        return re.sub(r"'(.*)'", lambda found: repr(names[found[1]]), close)


def _sections_of(kind: Any) -> Iterator[type[Section]]:
    """Yield the section that a field is, or may be."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    elif get_origin(kind) in (Annotated, Union, UnionType):
        for each in get_args(kind):
            yield from _sections_of(each)
