"""A script as a train_func: its source runs as ``__main__``, as ``python script.py`` would run it. Worker side.

The script runs in the training thread of the worker, so the session's functions work in it. What a program expects to find is
set up for it and restored afterwards: ``__main__``, ``__file__``, ``sys.argv``, ``sys.path[0]`` and the working directory.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.machinery
import linecache
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TextIO

from raysgd.engine.config import EngineConfig, using_engine_config
from raysgd.errors import ConfigError
from raysgd.runs.output import MARK
from raysgd.session import context

#: Ray's log monitor shows what follows such a line as the name of the process; see ``ray._private.ray_constants``.
_NAME_OF_PROCESS = ":actor_name:"
_WITHOUT_ENGINE = (
    "raysgd run: the settings of the engine had no effect ({}): the script made no raysgd.Engine and did not call "
    "raysgd.accelerate."
)
_FIELDS = re.compile(r"(\d+):(\d+):(\d+):(begin|end)\s*", re.ASCII)


class ScriptExit(Exception):
    """A script has called ``sys.exit`` with a status other than 0.

    Attributes:
        status: The exit status of the command.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status

    def __str__(self) -> str:
        return f"the script called sys.exit({self.status})"


@dataclass(frozen=True)
class OutputMark:
    """A line that a rank prints before and after its script, on both of its streams.

    Attributes:
        token: Chosen by the command, so that no other output is taken for a mark.
        is_end: The script has ended.
    """

    token: str
    attempt: int
    rank: int
    world_size: int
    is_end: bool

    def line(self) -> str:
        kind = "end" if self.is_end else "begin"
        return f"{MARK}:{self.token}:{self.attempt}:{self.rank}:{self.world_size}:{kind}"

    @classmethod
    def parse(cls, line: str, token: str) -> tuple[str, OutputMark | None]:
        """Return the text before the mark that ends a line, and the mark; without a mark the whole line, and None."""
        text, found, fields = line.rpartition(f"{MARK}:{token}:")
        values = _FIELDS.fullmatch(fields) if found else None
        if values is None:
            return line, None
        attempt, rank, world_size = map(int, values.groups()[:3])
        return text, cls(token, attempt, rank, world_size, is_end=values[4] == "end")


class Script:
    """A script with its arguments, in the place of a train_func.

    Args:
        path: The absolute path of the script, on the machine of the command.
        source: Its content, which travels to the workers.
        arguments: The arguments of the script.
        folder: The working directory of the command; the worker changes to it if it exists there.
        shipped_path: The path of the script in the folder that Ray copies to the workers and makes their working
            directory; None: Ray copies no folder.
        module: Its name as a module of a package, ``package.train``, if it runs as ``python -m`` would run it.
        engine: The config for `raysgd.engine.config.current_engine_config`.
        token: See `OutputMark`.
    """

    def __init__(
        self,
        path: str,
        source: bytes,
        arguments: tuple[str, ...] = (),
        *,
        folder: str | None = None,
        shipped_path: str | None = None,
        module: str | None = None,
        engine: EngineConfig | None = None,
        token: str = "",
    ) -> None:
        stem = Path(path).stem if module is None else module.removesuffix(".__main__").rpartition(".")[2]
        self.__name__ = self.__qualname__ = stem  # names the folder of the run
        self._module = module
        self._path = path
        self._source = source
        self._arguments = arguments
        self._folder = folder
        self._shipped_path = shipped_path
        self._engine = engine
        self._token = token

    def __call__(self) -> None:
        """Run the script to its end.

        Raises:
            ScriptExit: It has called ``sys.exit`` with a status other than 0.
        """
        with self._marked_output(), using_engine_config(self._engine) as is_read, self._placed() as (path, search):
            code = self._compile(path)
            with _as_main(path, [path, *self._arguments], search, self._module) as namespace:
                try:
                    exec(code, namespace)
                except SystemExit as error:
                    if (status := exit_status(error.code)) != 0:
                        raise ScriptExit(status) from None
            if self._engine is not None and not is_read() and context.current().world_rank == 0:
                print(_WITHOUT_ENGINE.format(", ".join(sorted(self._engine.named()))), file=sys.stderr, flush=True)

    def check(self) -> None:
        """Check that the source can be compiled.

        Raises:
            SyntaxError: It is not Python.
        """
        self._compile(self._path)

    def _compile(self, path: str) -> CodeType:
        return compile(self._source, path, "exec", dont_inherit=True)

    @contextlib.contextmanager
    def _placed(self) -> Iterator[tuple[str, str]]:
        """Yield a path of the script on this machine and the folder of its modules; change to the working directory."""
        before = os.getcwd()
        with contextlib.ExitStack() as stack:
            stack.callback(os.chdir, before)
            if self._shipped_path is not None and Path(self._shipped_path).exists():
                path = os.path.abspath(self._shipped_path)
            else:
                if self._folder is not None and os.path.isdir(self._folder):
                    os.chdir(self._folder)
                path = self._path if self._is_here() else stack.enter_context(self._copy())
            yield path, self._folder_of_modules(path)

    def _folder_of_modules(self, path: str) -> str:
        """Return the folder of the script at ``path``; of a copy, the original folder if it exists here."""
        if self._module is not None:
            root = str(Path(path).parents[self._module.count(".")])
            if path != self._path and self._shipped_path is None:
                raise ConfigError(
                    f"the module {self._module} is not on this machine at {self._path}: give --working-dir with the folder of "
                    "its package, which Ray then copies, or install the package on all machines."
                )
            return root
        own = os.path.dirname(self._path)
        is_copy = path != self._path and self._shipped_path is None
        return own if is_copy and os.path.isdir(own) else os.path.dirname(os.path.realpath(path))  # as Python has it

    def _is_here(self) -> bool:
        """Return whether this machine has the same script at the same path."""
        try:
            return Path(self._path).read_bytes() == self._source
        except OSError:
            return False

    @contextlib.contextmanager
    def _copy(self) -> Iterator[str]:
        """Yield the path of a copy of the script, which other processes that the script starts can read."""
        folder = tempfile.mkdtemp(prefix="raysgd-script-")
        path = os.path.join(folder, os.path.basename(self._path))
        Path(path).write_bytes(self._source)
        # A traceback is made after the copy is gone. An entry without a time is not compared with the file.
        text = self._source.decode(errors="replace")
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        try:
            yield path
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _marked_output(self) -> Iterator[None]:
        """Name this process's output after its rank, and mark its begin and end."""
        session = context.current()
        if not session.in_worker or not self._token:
            yield
            return
        streams = sys.stdout, sys.stderr  # a script may put others in their place
        _print(streams, f"{_NAME_OF_PROCESS}rank {session.world_rank}")
        place = (self._token, session.attempt, session.world_rank, session.world_size)
        _print(streams, OutputMark(*place, is_end=False).line())
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            _print(streams, OutputMark(*place, is_end=True).line())


def exit_status(code: Any) -> int:
    """Return the exit status that Python makes of the argument of ``sys.exit``; other objects are printed, as by Python."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr, flush=True)
    return 1


@contextlib.contextmanager
def _as_main(path: str, argv: list[str], search: str, module: str | None) -> Iterator[dict[str, Any]]:
    """Yield the namespace of a new module ``__main__``, which is in place until the end of the block.

    As a ``module`` of a package it can import relatively, and its package is imported first.
    """
    main, loader = ModuleType("__main__"), importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __loader__=loader,
        __cached__=None,
    )
    saved_main, saved_argv, saved_path = sys.modules.get("__main__"), list(sys.argv), list(sys.path)
    sys.modules["__main__"] = main
    sys.argv[:] = argv
    sys.path.insert(0, search)
    importlib.invalidate_caches()  # modules next to the script may be newer than this process
    try:
        if module is not None:
            package = module.rpartition(".")[0]
            spec = importlib.machinery.ModuleSpec(module, loader, origin=path)
            main.__dict__.update(__package__=package, __spec__=spec)
            if package:
                importlib.import_module(package)
        yield main.__dict__
    finally:
        _restore(saved_main)
        sys.argv[:] = saved_argv
        sys.path[:] = saved_path


def _restore(main: ModuleType | None) -> None:
    if main is None:
        sys.modules.pop("__main__", None)
    else:
        sys.modules["__main__"] = main


def _print(streams: tuple[TextIO, TextIO], line: str) -> None:
    for stream in streams:
        stream.write(f"{line}\n")  # one write: otherwise the log monitor may read the line without its end
        stream.flush()
