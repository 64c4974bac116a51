"""What editors show of raysgd: pyright, which Pylance is built on, after an editable install."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from support.project import ROOT

BIN = Path(sys.executable).parent
#: What the examples of each backend import.
FRAMEWORKS = {
    "horovod_torch": "horovod",
    "horovod_tensorflow": "horovod",
    "jax": "jax",
    "keras": "tensorflow",
    "tensorflow": "tensorflow",
}
#: Its scripts import modules next to them: the folder of a script is in its path.
SHARED = ROOT / "examples" / "functions"
SETTINGS: dict[str, Any] = {
    "typeCheckingMode": "standard",
    # The examples show the usual way: what may be None there fails with an error that says so.
    "reportOptionalMemberAccess": "none",
    "reportOptionalSubscript": "none",
}


def check(folder: Path, *files: Path) -> list[dict[str, Any]]:
    """Return pyright's errors in these files; the package is found as an editable install lets it be found."""
    settings = {**SETTINGS, "include": [str(file) for file in files], "extraPaths": [str(ROOT), str(SHARED)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [BIN / "basedpyright", "--project", folder, "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.stdout, done.stderr
    return [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]


def test_examples_have_no_errors(tmp_path: Path) -> None:
    missing = tuple(name for name, package in FRAMEWORKS.items() if importlib.util.find_spec(package) is None)
    examples = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")]
    if importlib.util.find_spec("flax") is None:
        examples = [path for path in examples if path.parent != SHARED]
    errors = check(tmp_path, *[path for path in examples if not path.name.startswith(missing)])
    assert not errors, "\n".join(
        f"{each['file']}:{each['range']['start']['line'] + 1} {each['message']}" for each in errors
    )


WRONG = """
import raysgd

raysgd.Nope
raysgd.ScalingConfig
raysgd.importlib
raysgd.torch.nope
raysgd.tensorflow.nope
raysgd.callbacks.nope
raysgd.data.nope
raysgd.errors.nope
raysgd.Trainer(2).fit()
raysgd.Trainer(workers=2)
raysgd.Trainer(2, placement_strategy="PAK")
raysgd.TorchConfig(backend="mpi")
raysgd.HorovodConfig(framework="jax")
raysgd.JaxConfig(platform="gpu")
raysgd.CheckpointConfig(score_order="maximum")
raysgd.Trainer(2).run(print, returns="rank0")
raysgd.Trainer(2).run(print, reduce={"loss": "avg"})
raysgd.callbacks.ProgressCallback(mode="liv")
raysgd.get_dataset().get_split().iter_batches(format="polars")
raysgd.get_dataset().get_split().to_torch(shuffle="all")
raysgd.load_run("x").nope
"""


def test_names_and_options_that_do_not_exist_are_marked(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    lines = WRONG.splitlines()
    wanted = {number for number, line in enumerate(lines) if line.startswith("raysgd.")}
    marked = {each["range"]["start"]["line"] for each in check(tmp_path, tmp_path / "wrong.py")}
    assert [lines[number] for number in sorted(wanted ^ marked)] == []


def test_editable_install_adds_the_folder_to_the_path(tmp_path: Path) -> None:
    """Setuptools would otherwise install a hook that finds the package when it is imported: no editor runs it."""
    copy = tmp_path / "project"
    (copy / "raysgd" / "data").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "raysgd/__init__.py", "raysgd/_version.py"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    (copy / "raysgd" / "data" / "__init__.py").touch()
    code = f"from setuptools import build_meta; print(build_meta.build_editable({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        paths = [wheel.read(name).decode().strip() for name in wheel.namelist() if name.endswith(".pth")]
        assert paths == [str(copy)] and not [name for name in wheel.namelist() if name.endswith(".py")]


class LanguageServer:
    """Pyright as an editor's language server, for one file."""

    def __init__(self, folder: Path) -> None:
        command = [BIN / "basedpyright-langserver", "--stdio"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)
        self._uri = (folder / "mine.py").as_uri()
        self._id = 0
        settings = {
            "basedpyright": {"analysis": {**SETTINGS, "extraPaths": [str(ROOT)]}},
            "python": {"pythonPath": sys.executable},
        }
        self._settings = settings
        folders = [{"uri": folder.as_uri(), "name": "mine"}]
        abilities = {"workspace": {"configuration": True}}
        self._ask(
            "initialize", processId=None, rootUri=folder.as_uri(), workspaceFolders=folders, capabilities=abilities
        )
        self._notify("initialized")

    def complete(self, text: str) -> list[str]:
        """Return what can follow the text."""
        version = self._id
        document = {"uri": self._uri, "languageId": "python", "version": version, "text": text}
        self._notify("textDocument/didOpen", textDocument=document)
        line = text.count("\n")
        position = {"line": line, "character": len(text.splitlines()[-1])}
        found = self._ask("textDocument/completion", textDocument={"uri": self._uri}, position=position)
        self._notify("textDocument/didClose", textDocument={"uri": self._uri})
        return [item["label"] for item in (found or {}).get("items", [])]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _notify(self, method: str, **params: Any) -> None:
        self._send({"method": method, "params": params})

    def _ask(self, method: str, **params: Any) -> Any:
        self._id += 1
        asked = self._id
        self._send({"id": asked, "method": method, "params": params})
        while True:
            message = self._receive()
            if message.get("id") == asked and "method" not in message:
                assert "error" not in message, message
                return message["result"]
            if "id" in message:  # the server asks for settings
                items = message.get("params", {}).get("items", [])
                sections = [self._section(item.get("section", "")) for item in items]
                self._send({"id": message["id"], "result": sections if items else None})

    def _section(self, name: str) -> Any:
        found: Any = self._settings
        for part in name.split("."):
            found = found.get(part, {}) if part else found
        return found

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        length = 0
        while line := self._process.stdout.readline().strip():
            if found := re.fullmatch(rb"Content-Length: (\d+)", line):
                length = int(found[1])
        assert length, "the language server has ended"
        message: dict[str, Any] = json.loads(self._process.stdout.read(length))
        return message


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageServer]:
    server = LanguageServer(tmp_path_factory.mktemp("editor"))
    yield server
    server.close()


@pytest.mark.parametrize("package", ["raysgd", "raysgd.callbacks", "raysgd.data"])
def test_public_names_are_completed_and_no_others(server: LanguageServer, package: str) -> None:
    found = {name for name in server.complete(f"import raysgd\n{package}.") if not name.startswith("_")}
    public = set(importlib.import_module(package).__all__)
    assert public <= found and not found & {"importlib", "typing", "Any", "TYPE_CHECKING", "annotations"}
    assert package != "raysgd" or found == public


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ('raysgd.Trainer(2, placement_strategy="', {"PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"}),
        ('raysgd.Trainer(2, "', {"torch", "horovod", "tensorflow", "jax", "env", "none"}),
        ('raysgd.TorchConfig(backend="', {"gloo", "nccl"}),
        ('raysgd.Trainer(2).run(print, returns="', {"first", "all"}),
        ('raysgd.callbacks.ProgressCallback(mode="', {"auto", "live", "lines", "off"}),
    ],
)
def test_string_options_are_completed(server: LanguageServer, text: str, options: set[str]) -> None:
    found = {name.strip("\"'") for name in server.complete(f"import raysgd\n{text}")}
    assert options <= found
