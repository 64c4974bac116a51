"""The program of the guide that prints nothing prints nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support import command
from support.project import ROOT
from support.snippets import snippets


def test_program_without_output_prints_nothing(tmp_path: Path) -> None:
    page = ROOT / "doc" / "guides" / "monitoring.md"
    (program,) = [each for each in snippets(page, "python") if "ray.init(" in each.code]
    script = tmp_path / "program.py"
    script.write_text(program.code)
    variables = command.environment(None, HOME=str(tmp_path))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.glob("raysgd_runs/*/*/metrics*")), "there was no run"
