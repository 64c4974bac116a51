"""Defers the import of torch's compiler until something is compiled. Worker side.

torch imports ``torch._dynamo`` for the first optimizer of a process, and needs nothing of it: it asks the compiler to leave some
functions alone. The import takes as long as that of torch itself. `defer` puts a module in its place that answers what
optimizers, DistributedDataParallel and process groups ask for while nothing has been compiled; at any other use it becomes the
compiler's own module, as those of Python's ``importlib.util.LazyLoader`` do.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

from raysgd.checkpoint.codecs.compiled import accept_plain_names
from raysgd.session import context

_NAME = "torch._dynamo"
#: Its settings need nothing else of it. Sharded tensors read them.
_CONFIG = f"{_NAME}.config"
#: The attribute in which torch keeps a function that the compiler leaves alone (``torch/_compile.py``).
_KEPT = "__dynamo_disable"
#: The time that a thread waits for the import of another one.
_PATIENCE_S = 60.0


class _DeferredModule(ModuleType):
    """Is ``torch._dynamo`` before it is executed. What it has itself is in its ``__dict__``."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # these are asked for by what looks at all modules
            if f"{_NAME}.{name}" == _CONFIG:
                return importlib.import_module(_CONFIG)
            load()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")


class _DeferredPart:
    """Is a module of the compiler: has some of its functions, and imports it for the others."""

    def __init__(self, name: str, **functions: Callable[..., Any]) -> None:
        self._name = name
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        load()
        return getattr(importlib.import_module(f"{_NAME}.{self._name}"), name)


class _Finder:
    """Finds the parts of the compiler's package, which is executed before them.

    It imports nothing itself: Python 3.11 calls it with the lock of all imports.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}.") or name == _CONFIG or _state.is_loading:
            return None
        found = PathFinder.find_spec(name, path)
        return None if found is None else ModuleSpec(name, _PartLoader(found), origin=found.origin)


class _PartLoader(Loader):
    """Executes the package, and takes the part that this has imported; the import system would import it again."""

    def __init__(self, found: ModuleSpec) -> None:
        self._found = found
        self._is_present = False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        load(patience_s=0)  # the thread that executes the package may wait for this part
        present = sys.modules.get(spec.name)
        self._is_present = present is not None
        return present or importlib.util.module_from_spec(self._found)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._found
        if not self._is_present:
            assert self._found.loader is not None
            self._found.loader.exec_module(module)


class _State:
    """What is deferred in this process.

    Attributes:
        module: The deferred module; None: nothing is deferred.
        own: What it has of its own.
        left_alone: Functions that torch has asked to leave alone, and keeps what it got for.
        is_loading: It is being executed, by the thread that has the lock.
    """

    def __init__(self) -> None:
        self.module: _DeferredModule | None = None
        self.own: dict[str, Any] = {}
        self.finder = _Finder()
        self.left_alone: list[FunctionType] = []
        self.is_loading = False
        self.lock = threading.RLock()


_state = _State()


def defer() -> None:
    """Defer the import of ``torch._dynamo``, unless this process has imported it, or has not imported torch."""
    accept_plain_names()
    torch, spec = sys.modules.get("torch"), None
    if torch is not None and _NAME not in sys.modules:
        spec = importlib.util.find_spec(_NAME)
    if torch is None or spec is None:
        return
    module = _DeferredModule(_NAME)
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, _NAME
    module.__path__ = spec.submodule_search_locations or []
    _state.own = {
        "disable": _disable,
        "graph_break": lambda msg="": None,
        "utils": _DeferredPart("utils", get_optimize_ddp_mode=_get_optimize_ddp_mode),
        "trace_rules": _DeferredPart("trace_rules", clear_lru_cache=lambda: None),
    }
    module.__dict__.update(_state.own)
    _state.module = module
    sys.modules[_NAME] = module
    torch._dynamo = module  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _state.finder)


def _get_optimize_ddp_mode() -> str:
    config = sys.modules.get(_CONFIG)
    if config is None or config.optimize_ddp is True:  # its default
        return "ddp_optimizer"
    load()
    return str(sys.modules[f"{_NAME}.utils"].get_optimize_ddp_mode())


def is_deferred() -> bool:
    """Return whether the compiler's import was deferred, and nothing has needed it so far."""
    return _state.module is not None


def load(patience_s: float = _PATIENCE_S) -> None:
    """Execute the deferred module, if there is one, or wait for the thread that does; a part that it imports finds it begun."""
    has_lock = _state.lock.acquire(timeout=patience_s)
    try:
        if _state.module is None or _state.is_loading:
            return
        _state.is_loading = True
        try:
            _execute(_state.module)
            _state.module = None
        finally:
            _state.is_loading = False
    finally:
        if has_lock:
            _state.lock.release()


def _execute(module: _DeferredModule) -> None:
    spec = module.__spec__
    assert spec is not None and spec.loader is not None
    module.__file__ = spec.origin
    spec.loader.exec_module(module)
    module.__class__ = ModuleType  # type: ignore[assignment]
    for name, value in _state.own.items():
        if module.__dict__.get(name) is value:
            delattr(module, name)
    for function in _state.left_alone:  # torch asks again, and this time the compiler answers
        function.__dict__.pop(_KEPT, None)
    sys.meta_path.remove(_state.finder)
    accept_plain_names()
    _time_compilations()


def _time_compilations() -> None:
    """Count the time that the compiler works as that use of train_func's time. Its callbacks are those of a whole compilation."""
    handler = importlib.import_module(f"{_NAME}.callback").callback_handler
    handler.register_start_callback(lambda _: context.current().progress.compiling.__enter__())
    handler.register_end_callback(lambda _: context.current().progress.compiling.__exit__())


def _disable(fn: Any = None, recursive: bool = True, **settings: Any) -> Any:
    """Stand in for ``torch._dynamo.disable``. torch's own functions can be called as they are, until the compiler exists."""
    if not isinstance(fn, FunctionType) or not (fn.__module__ or "").startswith("torch."):
        load()
        return sys.modules[_NAME].disable(fn, recursive, **settings)
    if settings == {"wrapping": False}:
        _state.left_alone.append(fn)
        return fn

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_deferred():
            return fn(*args, **kwargs)
        return sys.modules[_NAME].disable(fn, recursive, **settings)(*args, **kwargs)

    return call
