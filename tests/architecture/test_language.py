"""The project's texts keep to plain technical English: the words of doc/glossary.md, and docstrings that stand alone."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.project import PACKAGE, ROOT, name_of

#: How often replaced words still occur, as (names, texts). Lower these numbers; never raise them.
ALLOWED = {"raysgd": (0, 9), "examples": (0, 0), "benchmarks": (0, 0), "tests": (0, 4), "doc": (0, 0)}
#: How many docstrings of public objects still begin with something else than a sentence, an imperative or a noun phrase.
ALLOWED_DOCSTRINGS = 18

PLAIN = re.compile(  # "is no longer", "has not yet" and the like are plain English
    r"\b(is|are) no (longer|more|less)\b|\b(has|have) not (yet|\w+ed)\b|go on to\b|\bthere (is|are) no\b", re.IGNORECASE
)
DANGLING = set(
    "It They He She That These Those Which Who Whose Whom Of And Or But Not As By With To In On At From If When While Where What "
    "How So Also Only Both".split()
)


def patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Read the table of replaced words: one pattern for names in snake case, one for text."""
    rows = (Path(__file__).parent / "replaced_words.txt").read_text(encoding="utf-8").splitlines()
    kinds: dict[str, list[str]] = {"name": [], "text": []}
    for row in rows:
        if row and not row.startswith("#"):
            where, pattern, _ = (cell.strip() for cell in row.split(" | "))
            for kind in ("name", "text") if where == "both" else (where,):
                kinds[kind].append(pattern)
    names, texts = "|".join(kinds["name"]), "|".join(kinds["text"])
    return re.compile(rf"(?:^|_)(?:{names})(?:_|$)"), re.compile(rf"\b(?:{texts})\b", re.IGNORECASE)


NAME, TEXT = patterns()


def snake(name: str) -> str:
    return "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)).lower()


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each identifier that the code defines, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def lines_with_replaced_words(text: str, first: int = 1) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), first):
        for match in TEXT.finditer(line):
            if not any(plain.start() <= match.start() < plain.end() for plain in PLAIN.finditer(line)):
                yield number, f"[{match.group()}] {line.strip()[:120]}"


def replaced_words_in(path: Path) -> tuple[list[str], list[str]]:
    """Find what a file has of the replaced words: in names, in text."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return [], [f"{name_of(path)}:{line}: {what}" for line, what in lines_with_replaced_words(source)]
    names = [(0, path.stem), *names_in(ast.parse(source))]
    texts: list[tuple[int, str]] = []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline) if TEXT.search(source) else ()
    for token in tokens:
        if token.type in (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", None)):
            texts += lines_with_replaced_words(token.string, token.start[0])
    return (
        [f"{name_of(path)}:{line}: {name}" for line, name in names if NAME.search(snake(name))],
        [f"{name_of(path)}:{line}: {what}" for line, what in texts],
    )


def sources(area: str) -> list[Path]:
    if area == "doc":
        return [*sorted((ROOT / "doc").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
    return sorted((ROOT / area).rglob("*.py"))


def public_docstrings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and docstring of the public functions, classes and methods of a module that have one."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[int, str, str]]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name[0] != "_":
                if docstring := ast.get_docstring(node):
                    yield node.lineno, prefix + node.name, docstring
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body, f"{node.name}.")

    yield from walk(ast.parse(path.read_text(encoding="utf-8")).body, "")


def stands_alone(docstring: str) -> bool:
    """Return whether a docstring begins with a capital and a word that can open a sentence, and has more than one word."""
    words = docstring.split()
    opens = words[0][0].isupper() or words[0][0] in "`'\"" or "_" in words[0]  # a name of the code may stand first
    return opens and len(words) > 1 and words[0].strip(",.:") not in DANGLING


@pytest.mark.parametrize("area", ALLOWED)
def test_replaced_words_do_not_come_back(area: str) -> None:
    found = [replaced_words_in(path) for path in sources(area)]
    names, texts = [line for file in found for line in file[0]], [line for file in found for line in file[1]]
    allowed_names, allowed_texts = ALLOWED[area]
    advice = "write the words of doc/glossary.md (tests/architecture/replaced_words.txt says which)"
    counts = f"{len(names)} names and {len(texts)} texts, allowed are {allowed_names} and {allowed_texts}; {advice}\n"
    assert len(names) <= allowed_names and len(texts) <= allowed_texts, counts + "\n".join([*names, *texts])


def test_docstrings_of_public_objects_stand_alone() -> None:
    found = [
        f"{name_of(path)}:{line}: {name}: {docstring.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name, docstring in public_docstrings(path)
        if not stands_alone(docstring)
    ]
    assert len(found) <= ALLOWED_DOCSTRINGS, f"{len(found)}, {ALLOWED_DOCSTRINGS} allowed\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("The run is no longer live.", False),
        ("There is no file.", False),
        ("It is " + "no name.", True),
        ("a new" + "comer", True),
    ],
)
def test_replaced_words_are_found_in_text(text: str, is_found: bool) -> None:
    assert bool(list(lines_with_replaced_words(text))) == is_found


@pytest.mark.parametrize(("name", "is_found"), [("WorkDes" + "k", True), ("desktop", False), ("was_tol" + "d", True)])
def test_replaced_words_are_found_in_names(name: str, is_found: bool) -> None:
    assert bool(NAME.search(snake(name))) == is_found
