"""Read a training from its file, and check its values and the names of its components, on the driver, before anything starts.

Neither Ray nor a component is imported, but Ray for a search.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import os
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from raysgd.config import ScalingConfig
from raysgd.config.argument_names import nearest
from raysgd.declarative.args import TrainerArgs, as_values
from raysgd.declarative.fields import FieldError, of_field
from raysgd.declarative.hooks import HOOKS, TrainHook, count_arguments
from raysgd.declarative.hooks import check_names as check_hook_names
from raysgd.declarative.reading import Tree
from raysgd.declarative.strategies import check_sizes, engine_fields, is_planned
from raysgd.declarative.values import TYPE_KEY, VALUE_KEY, VALUE_TYPE_KEY, ComponentError, Importer, is_full_name
from raysgd.engine.config import EngineConfig

#: Fields outside of sections of components that have the full name of a function.
_FUNCTIONS = (("init_env_fn",), ("optimizer", "aggregate_outputs_fn"), ("dataloader", "train_args", "collate_fn"))
#: What gives a module names that its source does not show.
_DYNAMIC = re.compile(
    r"\bimport\s*\(?\s*\*|\b(__getattr__|__path__|__dict__|globals|locals|exec|setattr|import_module|__import__)\b"
    r"|(?<!\.)\b(vars|eval)\b|\bsys\s*\.\s*modules\b|\bfrom\s+sys\b|\bsys\s+as\b"
)


def load_args(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainerArgs:
    """Read a training from a YAML file.

    Args:
        path: The file.
        overrides: Words as on the command line, such as ``["--max_epochs", "2", "--model.args.dim=32"]``.

    Raises:
        ConfigError: It cannot be read, or a value is not allowed; the text names file, line and key.
    """
    return load_tree(path, overrides)[0]


def load_tree(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> tuple[TrainerArgs, Tree]:
    """Read a training from a YAML file as `load_args` does; return it with the places of its values."""
    tree = Tree.of_file(os.fspath(path))
    tree.override(overrides)
    args = tree.make_args()
    with tree.naming_places():
        check_names(args)
        if not is_full_name(args.pas_policy):  # it adds fields, and is called when the training starts
            engine = EngineConfig.of(engine_fields(args, Importer(args=args)))
            if not is_planned(args):
                with of_field("engine", names=args.engine):
                    ScalingConfig(num_workers=args.num_workers, workers_per_replica=engine.workers_per_replica)
                check_sizes(args, args.num_workers, engine.workers_per_replica)
        if args.search is not None:
            from raysgd.declarative.searching import check_search  # imports Ray

            check_search(args)
    return args, tree


@contextlib.contextmanager
def working_in(folder: str) -> Iterator[None]:
    """Make a folder, where it exists, the working directory of the block, and the modules in it importable."""
    if not os.path.isdir(folder):
        yield
        return
    before, is_new = os.getcwd(), folder not in sys.path
    sys.path[:0] = [folder] * is_new
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        if is_new:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)


def check_names(args: TrainerArgs, importer: Importer | None = None) -> list[str]:
    """Check that components may be imported and exist in the modules of this machine, without importing them.

    Returns:
        What to warn of: components whose modules this machine does not have. Workers elsewhere may have them.

    Raises:
        FieldError: One certainly does not exist, or may not be imported.
    """
    missing = []
    found = list(_find_names(as_values(args), ()))
    for path, name in found:
        if importer is not None and path[0] != "log" and is_full_name(name):  # known loggers are not imported
            try:
                importer.check_allowed(name, name)
            except ComponentError as error:
                raise FieldError(path, str(error)) from None
    with working_in(os.getcwd()):
        for path, name in found:
            text = explain_missing(name)
            if text is not None and not args.trainer.get("runtime_env"):  # with it, workers may have other modules
                raise FieldError(path, text)
            module = name.partition(".")[0]
            # `find_spec` raises for loaded modules without a specification, such as __main__.
            if len(path) == 2 and module not in sys.modules and importlib.util.find_spec(module) is None:
                close = nearest(module, [each.name.removesuffix(".py") for each in os.scandir()])
                missing.append(
                    f"{'.'.join(path)} {name}: there is no module {module!r} in the working directory {os.getcwd()} or installed "
                    f"here{close}; the training fails if the workers have none either."
                )
        if not args.trainer.get("runtime_env"):
            check_hooks(args)
    return missing


def _find_names(values: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the fields that have the full name of a class or function, and the names."""
    entries = enumerate(values) if isinstance(values, list) else values.items() if isinstance(values, Mapping) else ()
    for key, value in entries:
        here = (*path, str(key))
        if isinstance(value, str) and (here in _FUNCTIONS or _is_name(here, values)):
            yield here, value
        else:
            yield from _find_names(value, here)


def _is_name(path: tuple[str, ...], values: Any) -> bool:
    *_, owner, key = ("", *path)
    in_arguments = any(part.endswith("args") for part in path[:-1])
    if key == VALUE_KEY:
        return in_arguments and values.get(VALUE_TYPE_KEY) == "function"
    return key == TYPE_KEY if in_arguments else key == "type" or owner == "hook"


def explain_missing(name: str) -> str | None:
    """Return why a full name certainly does not exist: its module has no such word in its source; None if it may exist.

    The source is read, not executed, and no package is imported. Modules that are not written in Python, and those whose source
    does not show their names, such as one with ``from other import *``, may have any name.
    """
    module, word = _find_module(name)
    if module is None or word.startswith("__") or hasattr(sys.modules.get(module.name), word):
        return None
    source = _read_source(module)
    words = set(re.findall(r"\w+", source))
    if not source or word in words:
        return None
    close = nearest(word, [each for each in words if not each.startswith("_")])
    return f"{name}: {module.name} has no {word!r}{close}."


def _find_module(name: str) -> tuple[ModuleSpec | None, str]:
    """Return the module of a full name without importing it, or None, and the part of the name that follows it."""
    first, *parts = name.split(".")
    if not is_full_name(name) or first == "__main__":  # that of a worker is another one
        return None, ""
    try:
        spec = importlib.util.find_spec(first)
        while spec is not None and parts:
            places, part = spec.submodule_search_locations, parts.pop(0)
            inner = None if places is None else PathFinder.find_spec(f"{spec.name}.{part}", list(places))
            if inner is None:
                return spec, part
            spec = inner
    except (ImportError, KeyError, ValueError):  # made by a notebook, or a folder without __init__.py in a package
        pass
    return None, ""


def _read_source(module: ModuleSpec) -> str:
    """Return a module's source; empty if it is not written in Python, or does not show all names of the module."""
    path = str(module.origin)
    if not path.endswith(".py"):
        return ""
    try:
        with tokenize.open(path) as file:
            source = file.read()
    except (OSError, SyntaxError, ValueError):  # an import says more about these
        return ""
    return "" if _DYNAMIC.search(source) else source


# -- hooks -----------------------------------------------------------------------------------------------------------------


def check_hooks(args: TrainerArgs) -> None:
    """Check names and arguments of hooks, as far as the sources of their modules show them. Workers check all of them.

    Raises:
        FieldError: A method is named like a hook and is none, or a hook cannot be called with what hooks get.
    """
    for field in ("model", "optimizer", "lr_scheduler", "hook"):
        part = getattr(args, field)
        if isinstance(part, Mapping):
            for name, function in part.items():
                word, definitions = _find_definitions(function)
                with of_field(field, name):
                    _check_hook(name, f"{field}.{name} {function}", definitions.get(word))
        elif part is not None:
            kinds = [
                kind for kind, is_hook in _list_classes(*_find_definitions(part.type)) if is_hook or field == "hook"
            ]
            with of_field(field, "type"):
                for node in (node for kind in kinds for node in kind.body if isinstance(node, ast.FunctionDef)):
                    check_hook_names(f"{field}.type {part.type}", [node.name])
                    _check_hook(node.name, f"{part.type}.{node.name}", node, is_method=True)


def _find_definitions(name: str) -> tuple[str, dict[str, ast.stmt]]:
    """Return the last part of a full name, and the classes and functions of its module by their names, without importing it."""
    module, word = _find_module(name)
    try:
        nodes = [] if module is None else ast.parse(_read_source(module)).body
    except (SyntaxError, ValueError):
        nodes = []
    return word, {node.name: node for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def _list_classes(name: str, definitions: dict[str, ast.stmt]) -> list[tuple[ast.ClassDef, bool]]:
    """Return a class and the bases that its module defines, each with whether it is a `TrainHook`."""
    kind = definitions.get(name)
    if not isinstance(kind, ast.ClassDef):
        return []
    others = {other: node for other, node in definitions.items() if other != name}
    bases = [ast.unparse(base) for base in kind.bases]
    inherited = [found for base in bases for found in _list_classes(base, others)]
    is_hook = any(base.rpartition(".")[2] == TrainHook.__name__ for base in bases) or any(each for _, each in inherited)
    return [(kind, is_hook), *inherited]


def _check_hook(name: str, what: str, node: ast.stmt | None, *, is_method: bool = False) -> None:
    if not isinstance(node, ast.FunctionDef) or name not in HOOKS:
        return
    decorators = [ast.unparse(each) for each in node.decorator_list]
    if decorators in ([], ["staticmethod"]):  # others may change the arguments
        count_arguments(name, what, _signature_of(node.args, is_bound=is_method and not decorators))


def _signature_of(given: ast.arguments, *, is_bound: bool) -> inspect.Signature:
    kind = inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    num_needed = len(positional) - len(given.defaults)
    parameters = [
        kind(each.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if place < num_needed else None)
        for place, each in enumerate(positional)
    ][is_bound:]
    if given.vararg is not None:
        parameters.append(kind(given.vararg.arg, kind.VAR_POSITIONAL))
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(kind(each.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None))
    return inspect.Signature(parameters)
