"""Write constraints.txt from what is installed: `.venv/bin/python tools/pin.py`, after a test run that passed.

It pins all that raysgd and its extras need, directly or not, and nothing else. A pin that an older Python could not
install gets a marker, so that pip chooses for itself there.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("torch", "tensorflow", "jax", "mlflow", "wandb", "dev", "doc")
PYTHONS = [Version(f"3.{minor}") for minor in range(10, 20)]
HEADER = """\
# The versions the tests run on. Written by tools/pin.py; setup.py says what is allowed beyond them.
"""


def closure(name: str, extras: tuple[str, ...]) -> set[str]:
    """Names of all installed distributions that `name` with `extras` needs, itself left out."""
    seen: set[tuple[str, str]] = set()
    todo = [(name, extra) for extra in ("", *extras)]
    while todo:
        item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        todo += _needs(*item)
    return {found for found, _ in seen} - {name}


def _needs(name: str, extra: str) -> list[tuple[str, str]]:
    needs = []
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            found = canonicalize_name(distribution(requirement.name).name)
        except PackageNotFoundError:
            continue  # needed on another platform only
        needs += [(found, wanted) for wanted in ("", *requirement.extras)]
    return needs


def pin(name: str) -> str:
    """The line of constraints.txt for one installed distribution."""
    found = distribution(name)
    line = f"{name}=={Version(found.version).public}"  # without a build's local label, such as +cpu
    allowed = SpecifierSet(found.metadata.get("Requires-Python") or "")
    oldest = next(python for python in PYTHONS if allowed.contains(f"{python}.99"))
    return line if oldest == PYTHONS[0] else f'{line}; python_version >= "{oldest}"'


def main() -> None:
    names = sorted(closure("raysgd", EXTRAS))
    (ROOT / "constraints.txt").write_text(HEADER + "".join(f"{pin(name)}\n" for name in names), encoding="utf-8")
    print(f"constraints.txt: {len(names)} pins")


if __name__ == "__main__":
    main()
