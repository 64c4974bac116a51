"""Change the package in one small place at a time, and list the changes that no test notices.

    python tools/mutations.py                                   # 100 mutants of each folder of FOLDERS: `make mutations`
    python tools/mutations.py raysgd/engine --sample 40 --seed 7
    python tools/mutations.py raysgd/engine --only gradients.py:80   # each mutant of a line

First, each test file of a folder runs once, and the lines of the folder that each test executes are kept in build/mutations/.
Then each mutant runs the tests that execute its line, those that have words of the line first, and what these do not notice is
left to the gate's tests of several ranks. They run in a process that is forked from one that has imported torch and Ray. The
mutant is a copy of the package, made of links and one changed file, so that processes that the tests start import it too.
The status is 1 if more than MAX_SURVIVORS of the mutants of a folder survive, without those that are kept.

doc/design/0054-mutations.md says why this is not mutmut or cosmic-ray, and which survivors are kept.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "mutations"
PAGE = ROOT / "doc" / "design" / "0054-mutations.md"

#: The folders, and the unit tests that cover them.
FOLDERS = {
    "raysgd/engine": "test_engine_*",
    "raysgd/declarative": "test_declarative_* test_cli_train test_cli_plan",
    "raysgd/functions/worker": "test_functions_* test_jax_*",
    "raysgd/controller/policies": "test_controller_* test_config test_promised_numbers",
    "raysgd/controller/state_machine": "test_controller_* test_promised_numbers",
    "raysgd/session": "test_session_* test_promised_numbers test_torch_logical test_jax_logical test_cli_checkpoints",
    "raysgd/data/order": "test_data_*",
}
#: What several ranks do is executed by no unit test: the gate's tests of a file or folder that run for its survivors.
SEVERAL_RANKS = {
    "raysgd/engine/tensor_parallel": ["tests/integration/test_engine_parallel.py", "-k", "tp or sp or own_plan"],
    "raysgd/engine/pipeline": ["tests/integration/test_engine_parallel.py", "-k", "pipeline or several"],
    "raysgd/engine/planning": ["tests/integration/test_engine_plan_ranks.py"],
    "raysgd/engine": ["tests/integration/test_engine_pairs.py", "tests/integration/test_engine_loops.py"],
}
RANKS_S = 600.0
MAX_SURVIVORS = 0.1
#: A mutant's tests took at most this long while lines were recorded; the mutant itself may take PATIENCE times that.
TESTS_S, PATIENCE, LEAST_S = 30.0, 5.0, 60.0
PRELOADED = ("torch", "torch.distributed.tensor", "ray", "pytest", "hypothesis", "pandas", "pyarrow", "pyarrow.fs")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_REMOVED_CALLS = {"abs", "sorted", "list", "dict", "set", "reversed", "deepcopy", "clone", "detach", "copy"}


@dataclass(frozen=True)
class Mutant:
    """A change of one place of a file.

    Attributes:
        path: The file, relative to the project.
        line: The first line of what is changed; from 1.
        scope: The lines of the innermost function around it; (0, 0) for what runs when the module is imported.
        start: Where the changed text begins in the file, in bytes; `end` is where it ends.
        new: The new text.
        what: The change in words.
        code: The line.
    """

    path: str
    line: int
    scope: tuple[int, int]
    start: int
    end: int
    new: str
    what: str
    code: str

    def name(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"

    def row(self) -> str:
        """Return the beginning of its row in the table of kept survivors, which does not change with the lines above it."""
        return " | ".join((f"| `{self.path}`", f"`{self.code}`", self.what, "")).strip()


# --------------------------------------------------------------------------------------------------------- mutants


class _Finder(ast.NodeVisitor):
    """Finds the mutants of one file. Annotations, what asserts, f-strings and `TYPE_CHECKING` are left as they are."""

    def __init__(self, path: Path) -> None:
        self.found: list[Mutant] = []
        self._path = path.relative_to(ROOT).as_posix()
        self._source = path.read_bytes()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._scope = (0, 0)

    def _add(self, node: Any, new: ast.AST | str) -> None:
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        text = new if isinstance(new, str) else f"({ast.unparse(new)})"
        old = " ".join(self._source[start:end].decode().split())
        what, code = f"`{old}` -> `{text}`", self._source.splitlines()[node.lineno - 1].decode().strip()
        self.found.append(Mutant(self._path, node.lineno, self._scope, start, end, text, what, code))

    def visit_FunctionDef(self, node: Any) -> None:
        for default in (*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)):
            self.visit(default)
        before, self._scope = self._scope, (node.body[0].lineno, node.end_lineno)
        for statement in node.body:
            self.visit(statement)
        self._scope = before

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("frozen", "strict"):  # `dataclass(frozen=True)`, `zip(strict=True)`: these assert
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self._negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, (ast.Name, ast.Attribute, ast.Call)):
            self._add(test, ast.UnaryOp(ast.Not(), test))

    def visit_Compare(self, node: ast.Compare) -> None:
        for number, operator in enumerate(node.ops):
            changed = [*node.ops[:number], _COMPARISONS[type(operator)](), *node.ops[number + 1 :]]
            self._add(node, ast.Compare(node.left, changed, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._add(node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self._add(node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(
            isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, (str, bytes)))
            for each in ast.walk(node)
        )
        if type(node.op) in _ARITHMETIC and not is_text:
            self._add(node, ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, str(node.value + 1))
        elif isinstance(node.value, float):
            self._add(node, str(node.value * 2 if node.value else 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name in _CALLS:
            self._add(node.func, _CALLS[name])
        elif name in _REMOVED_CALLS and len(node.args) == 1 and not isinstance(node.args[0], ast.GeneratorExp):
            self._add(node, node.args[0])
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _REMOVED_CALLS and not node.args:
            self._add(node, node.func.value)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            self._add(node, "pass")
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._scope != (0, 0) and any(isinstance(each, (ast.Attribute, ast.Subscript)) for each in node.targets):
            self._add(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "pass")  # numbers in messages are left as they are

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add(node, "return None")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "pass")

    visit_Break = visit_Continue  # noqa: N815
    visit_Delete = visit_Continue  # noqa: N815


def find_mutants(folder: str) -> list[Mutant]:
    """Return all mutants of a folder, in an order that does not change from run to run."""
    found: list[Mutant] = []
    for path in files_of(folder):
        finder = _Finder(path)
        finder.visit(ast.parse(path.read_bytes()))
        found += finder.found
    return found


def files_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


# ------------------------------------------------------------------------------------------------ tests of a line


class _Tracer:
    """A plugin of pytest that keeps which lines of a folder each test executes, and how long it takes."""

    def __init__(self, folder: str) -> None:
        self._prefix = str(ROOT / folder) + os.sep
        self._lines: dict[str, set[int]] = defaultdict(set)
        self.tests: dict[str, Any] = {}
        self._began = 0.0

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._prefix):
            return None
        add = self._lines[frame.f_code.co_filename].add

        def on_line(frame: FrameType, event: str, arg: Any) -> Any:
            add(frame.f_lineno)
            return on_line

        return on_line

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._lines, self._began = defaultdict(set), time.monotonic()
        self.tests[nodeid] = {"is_passed": True}
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests[report.nodeid]["is_passed"] &= report.outcome == "passed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        lines = {os.path.relpath(path, ROOT): sorted(numbers) for path, numbers in self._lines.items()}
        self.tests[nodeid].update(lines=lines, duration_s=time.monotonic() - self._began)


def _digest(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def record(folder: str, patience_s: float) -> dict[str, Any]:
    """Return the tests that cover a folder: the lines that each executes, and its duration.

    What was recorded is kept until the folder, the test file or tests/support changes.
    """
    shared = _digest(*files_of(folder), *sorted((ROOT / "tests" / "support").rglob("*.py")))
    names = [each for pattern in FOLDERS[folder].split() for each in (ROOT / "tests/unit").glob(f"{pattern}.py")]
    kept = BUILD / "lines" / folder.replace("/", ".")
    kept.mkdir(parents=True, exist_ok=True)
    tests: dict[str, Any] = {}
    for path in sorted(set(names)):
        file, digest = kept / f"{path.stem}.json", shared + _digest(path)
        entry = json.loads(file.read_text()) if file.exists() else {}
        if entry.get("digest") != digest:
            print(f"recording {path.name}", flush=True)
            tracer = _Tracer(folder)

            def run(path: Path = path, file: Path = file, tracer: _Tracer = tracer, digest: str = digest) -> int:
                status = _pytest([str(path)], [tracer])
                file.write_text(json.dumps({"digest": digest, "tests": tracer.tests}))
                return status

            _in_fork(run, patience_s)
            entry = json.loads(file.read_text()) if file.exists() else {}
            if entry.get("digest") != digest:
                print(f"{path.name} did not finish: its tests are not counted")
                continue
        tests.update(entry["tests"])
    return {name: test for name, test in tests.items() if test["is_passed"] and "lines" in test}


def tests_of(mutant: Mutant, tests: dict[str, Any]) -> list[str]:
    """Return the tests that execute the line of a mutant, the likeliest first; for a line of the module, those of the module.

    A test is likely to notice a mutant if it has words of the changed line.
    """
    first, last = mutant.scope

    def is_covering(lines: list[int]) -> bool:
        return mutant.line in lines if last else bool(lines)

    covering = {name for name, test in tests.items() if is_covering(test["lines"].get(mutant.path, []))}
    if not covering and last:  # a line that has no event of its own, such as the second line of an expression
        nearest = max(
            (
                number
                for test in tests.values()
                for number in test["lines"].get(mutant.path, [])
                if first <= number < mutant.line
            ),
            default=None,
        )
        covering = {name for name, test in tests.items() if nearest in test["lines"].get(mutant.path, [])}
    if not last:  # what imports the module may use a constant of it, and execute no line of it
        package, _, stem = mutant.path.removesuffix(".py").replace("/", ".").rpartition(".")
        imports = re.compile(rf"from {package}(\.{stem} import | import .*\b{stem}\b)")
        users = {path.relative_to(ROOT).as_posix() for path in files_of("raysgd") if imports.search(path.read_text())}
        covering |= {name for name, test in tests.items() if users & test["lines"].keys()}
        files = {name.partition("::")[0] for name in tests}
        users = {file for file in files if imports.search((ROOT / file).read_text())}
        covering |= {name for name in tests if name.partition("::")[0] in users}
    wanted = _words(mutant.what + mutant.code)
    words = {name: wanted & _words_of_test(name) for name in covering}
    counts = Counter(word for each in words.values() for word in each)
    likely = {name: sum(1 / counts[word] for word in each) for name, each in words.items()}  # rare words count for more
    chosen: list[str] = []
    total_s = 0.0
    for name in sorted(covering, key=lambda name: (-likely[name], tests[name]["duration_s"])):
        if not chosen or total_s + tests[name]["duration_s"] <= TESTS_S:
            total_s += tests[name]["duration_s"]
            chosen.append(name)
    return chosen


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]\w{3,}", text))


def _words_of_test(name: str) -> set[str]:
    """Return the words of a test's source, and of its parameters."""
    function = name.rpartition("::")[2].partition("[")[0]
    return _words(name) | _words_of_functions(name.partition("::")[0]).get(function, set())


@functools.cache
def _words_of_functions(file: str) -> dict[str, set[str]]:
    text = (ROOT / file).read_text()
    found = (each for each in ast.walk(ast.parse(text)) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))
    begins = {each: min(one.lineno for one in (each, *each.decorator_list)) for each in found}
    return {
        each.name: _words("\n".join(text.splitlines()[begin - 1 : each.end_lineno])) for each, begin in begins.items()
    }


# ----------------------------------------------------------------------------------------------------- processes


def _pytest(arguments: list[str], plugins: list[Any]) -> int:
    import pytest

    options = ["-q", "-n0", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-o", "addopts=--import-mode=importlib"]
    return int(pytest.main([*options, *arguments], plugins=plugins))


def _in_fork(function: Any, patience_s: float) -> int | None:
    """Call a function in a fork, and return the status it returns; None: it took too long. Its output is kept in a file."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setsid()
            with (BUILD / "output.txt").open("wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            status = function()
            sys.stdout.flush()
        finally:
            os._exit(status)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end_group(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    _end_group(child)
    os.waitpid(child, 0)
    return None


def _end_group(group: int) -> None:
    """End a test process, and those that it has left behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _make_package(mutant: Mutant, folder: Path) -> None:
    """Make a package of links to the original files, but for the file of the mutant."""
    original, copy = ROOT, folder
    for part in Path(mutant.path).parts:
        for each in original.iterdir() if original != ROOT else ():
            if each.name not in (part, "__pycache__"):
                (copy / each.name).symlink_to(each)
        original, copy = original / part, copy / part
        if original.is_dir():
            copy.mkdir()
    source = original.read_bytes()
    copy.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
    compile(copy.read_bytes(), mutant.path, "exec")


class _FirstFailure:
    """A plugin of pytest that writes the first test that fails."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid)


def run_mutant(mutant: Mutant, arguments: list[str], patience_s: float) -> str:
    """Run pytest with a mutant in place of the package; returns how it was noticed, or an empty text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_package(mutant, folder)
        failed = folder / "failed"

        def run() -> int:
            sys.path.insert(0, name)
            os.environ["PYTHONPATH"] = os.pathsep.join((name, str(ROOT)))
            sys.dont_write_bytecode = True  # links have the files of the original, and their bytecode
            return _pytest(["-x", *arguments], [_FirstFailure(failed)])

        status = _in_fork(run, patience_s)
        if status == 0:
            return ""
        return failed.read_text() if failed.exists() else "out of time" if status is None else f"status {status}"


def find_notice(mutant: Mutant, names: list[str], tests: dict[str, Any]) -> str:
    """Return how a mutant is noticed, or an empty text.

    The file with the first test runs first, alone, because pytest reads every file before it runs a test. What no unit test
    notices is left to the tests of several ranks, if the module has some.
    """
    first = [name for name in names if name.partition("::")[0] == names[0].partition("::")[0]]
    several = next((each for path, each in SEVERAL_RANKS.items() if mutant.path.startswith(path)), [])
    for part in (first, [name for name in names if name not in first], several):
        patience_s = max(LEAST_S, PATIENCE * sum(tests[name]["duration_s"] for name in part if name in tests))
        skipped: list[str] = []
        while part and (noticed := run_mutant(mutant, [*part, *skipped], RANKS_S if part is several else patience_s)):
            if is_passing(noticed, tests):
                return noticed
            skipped.append(f"--deselect={noticed}")
    return ""


def is_passing(name: str, tests: dict[str, Any]) -> bool:
    """Return whether what noticed a mutant, if it is a test, passes with a copy of the package that is not changed; once."""
    if "::" not in name:
        return True
    test = tests.setdefault(name, {"lines": {}, "duration_s": RANKS_S / PATIENCE})
    if "is_passing" not in test:
        unchanged = Mutant(next(iter(test["lines"]), "raysgd/__init__.py"), 0, (0, 0), 0, 0, "", "", "")
        test["is_passing"] = run_mutant(unchanged, [name], max(LEAST_S, PATIENCE * test["duration_s"])) == ""
    return bool(test["is_passing"])


# ---------------------------------------------------------------------------------------------------------- report


def check_folder(folder: str, arguments: argparse.Namespace, until: float) -> bool:
    """Run the mutants of a folder, and return whether few enough survive."""
    tests = record(folder, patience_s=600)
    mutants = find_mutants(folder)
    if arguments.only:
        file, _, line = arguments.only.partition(":")
        chosen = [each for each in mutants if each.path.endswith(file) and (not line or each.line == int(line))]
    else:
        chosen = random.Random(arguments.seed).sample(mutants, min(arguments.sample, len(mutants)))
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    counts: dict[str, int] = defaultdict(int)
    before = os.times()
    for mutant in chosen:
        if time.monotonic() > until:
            break
        counts["sampled"] += 1
        names, began = tests_of(mutant, tests), time.monotonic()
        noticed = find_notice(mutant, names, tests)
        if noticed:
            counts["killed"] += 1
            if arguments.verbose:
                duration_s = time.monotonic() - began
                print(f"killed    {mutant.name()}   by {noticed}   {duration_s:.1f} s", flush=True)
        elif mutant.row() in page:
            counts["kept"] += 1
        else:
            counts["survived"] += 1
            print(f"SURVIVED  {mutant.name()}   {len(names)} tests", flush=True)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    print(
        f"{folder}: {counts['sampled']} of {len(mutants)} mutants, {counts['killed']} killed, "
        f"{counts['survived']} survived, {counts['kept']} kept; "
        f"{cpu_s / max(counts['sampled'], 1):.1f} s of a CPU each; seed {arguments.seed}",
        flush=True,
    )
    return counts["survived"] <= MAX_SURVIVORS * counts["sampled"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="folders of FOLDERS; all of them if none is given")
    parser.add_argument("--sample", type=int, default=100, help="mutants of each folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--only", help="all mutants of a file, or of a line of it: gradients.py:80")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=float("inf"),
        help="seconds for all folders, each with its share, after which no mutant is started",
    )
    parser.add_argument("--verbose", action="store_true", help="list what was killed too, and by which test")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)
    BUILD.mkdir(parents=True, exist_ok=True)
    folders = arguments.folders or list(FOLDERS)
    for name in (*PRELOADED, *(("jax",) if any("functions" in each for each in folders) else ())):
        importlib.import_module(name)
    began, share_s = time.monotonic(), arguments.limit_s / len(folders)
    results = [
        check_folder(folder.rstrip("/"), arguments, began + share_s * number)
        for number, folder in enumerate(folders, 1)
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
