"""Take the pictures of the page of runs for README.md and doc/: two real runs of examples/01_digits.py, one with a killed worker.

    python tools/page_picture.py [doc/guides]

Needs a Chromium (tools/get_browser.sh).
"""

import runpy
import sys
import tempfile
from pathlib import Path

import raysgd
from raysgd.callbacks import ProgressCallback
from raysgd.cli.main import main as raysgd_command
from raysgd.testing import FaultPlan, Kill

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import launched, opened  # noqa: E402  (it is not installed)

EPOCHS = 40
#: File, width, height, theme and what is shown.
PICTURES = (
    ("runs.png", 1280, 960, "light", "#/charts?smooth=0.6"),
    ("runs-narrow.png", 400, 960, "dark", "#/charts?ranks=loss"),
    ("why.png", 1280, 1090, "light", "#/time?run=digits-fast/run_001"),
)


def train(folder: Path, name: str, lr: float, plan: FaultPlan | None) -> str:
    digits = runpy.run_path(str(ROOT / "examples" / "01_digits.py"))
    train_func = digits["train_func"] if plan is None else plan.wrap(digits["train_func"])
    run_config = raysgd.RunConfig(name=name, storage_path=folder, ray_address="local")
    with raysgd.Trainer(num_workers=2, backend="torch", seed=0, run_config=run_config) as trainer:
        config = {"lr": lr, "batch_size": 32, "epochs": EPOCHS}
        trainer.run(train_func, config, callbacks=[ProgressCallback(mode="off")], reduce={"loss": "mean"})
        return str(trainer.run_dir)


def main() -> None:
    output = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "doc" / "guides")
    with tempfile.TemporaryDirectory() as folder, launched() as browser:
        runs = [
            train(Path(folder), "digits-fast", 4e-3, FaultPlan([Kill(rank=1, step=18)])),
            train(Path(folder), "digits-slow", 1e-3, None),
        ]
        page = Path(folder) / "page.html"
        raysgd_command(["report", *runs, "-o", str(page)])
        for name, width, height, colours, shown in PICTURES:
            with opened(browser, page.as_uri() + shown, width=width, colours=colours) as tab:
                tab.wait_for("document.querySelectorAll('.uplot canvas, svg.stack').length >= 3")
                tab.page.set_viewport_size({"width": width, "height": height})
                (output / name).write_bytes(tab.page.screenshot())
            print(f"{output / name}: {(output / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
