"""Measure training steps of GPT-2 on a GPU, with the engine, by hand with torch, with Accelerate and with Fabric.

    python benchmarks/gpu_models.py [--quick] [--output FOLDER]

Writes gpu_models.json and gpu_models.md to doc/benchmarks, or to build/benchmarks with --quick, which also runs on a CPU.
Needs torch, NumPy, pyarrow and transformers; what else is missing is left out. No Ray is started. The GPU should have nothing
else to do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # raysgd, where it is not installed

import torch
from bench.engine_gpu import QUICK_SHAPES, SHAPES, measure, peak_flops
from bench.machine import ROOT, describe_machine
from bench.results import rounded
from bench.table import make_table

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
#: Of the time of the fastest other loop; of what the GPU can do.
STEP_LIMIT, MFU_LIMIT = 1.0, 0.45
TITLES = {"by_hand": "by hand", "engine": "engine", "accelerate": "Accelerate", "fabric": "Fabric"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, also without a GPU: does it all work?")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not args.quick:
        sys.exit("torch sees no GPU here, so nothing was measured.")
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed, so the steps of GPT-2 were not measured.")
        return
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    output.mkdir(parents=True, exist_ok=True)
    device = "cuda" if has_gpu else "cpu"
    rounds, steps = (2, 1) if args.quick else (11, 4)
    models: dict[str, Any] = {}
    for name, shape in (QUICK_SHAPES if args.quick else SHAPES).items():
        found = measure(shape, device, rounds=rounds, steps=steps, compiles=not args.quick)
        found["seconds"] = {loop: [rounded(each) for each in times] for loop, times in found["seconds"].items()}
        models[name] = {"tokens": shape.batch * shape.sequence, "batch": shape.batch, **found}
        if has_gpu:
            torch.cuda.empty_cache()
    document = {
        "machine": describe_machine(("transformers", "accelerate", "lightning_fabric", "lightning")),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "peak_flops": peak_flops(device),
        "compiled": not args.quick,
        "measured": date.today().isoformat(),
        "models": models,
    }
    (output / "gpu_models.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = render(document)
    (output / "gpu_models.md").write_text(page, encoding="utf-8")
    print(page)


def render(document: dict[str, Any]) -> str:
    """Return the page."""
    versions = ", ".join(f"{name} {version}" for name, version in document["machine"]["versions"].items())
    lines = [
        "# GPT-2 on a GPU",
        "",
        "<!-- Written by benchmarks/gpu_models.py; changes made here are lost. -->",
        "",
        f"Steps of GPT-2 in bf16 with AdamW{' and `torch.compile`' if document['compiled'] else ''}, in turns in one process "
        f"on {document['gpu'] or 'a CPU'}; {versions}.",
        "Tokens per second by the median time of a step, and of the GPU's bf16 products per second the share that the model",
        "needs (MFU; operations as in PaLM, appendix B).",
        "",
    ]
    rows, targets = [], []
    for name, found in document["models"].items():
        taken = {loop: statistics.median(times) for loop, times in found["seconds"].items()}
        cells = []
        for loop in TITLES:
            cells.append("-" if loop not in taken else _show(found, taken[loop], document["peak_flops"]))
        rows.append([f"{name}, batch {found['batch']}", *cells])
        ratio = taken["engine"] / min(time for loop, time in taken.items() if loop != "engine")
        targets.append(f"- {name}: {ratio:.3f} of the time of the fastest other loop, target {STEP_LIMIT:g}.")
        mfu = _mfu(found, taken["engine"], document["peak_flops"])
        if mfu is not None:
            targets.append(
                f"- {name}: MFU {mfu:.1%}, target {MFU_LIMIT:.0%}: {'met' if mfu >= MFU_LIMIT else '**missed**'}."
            )
        targets += [f"- {name}, {TITLES[loop]}: {why}." for loop, why in found["missing"].items()]
    lines += [
        make_table(["model", *TITLES.values()], rows),
        "",
        *targets,
        "",
        f"Measured on {document['measured']}.",
        "",
    ]
    return "\n".join(lines)


def _show(found: dict[str, Any], seconds: float, peak: float | None) -> str:
    mfu = _mfu(found, seconds, peak)
    return f"{found['tokens'] / seconds:,.0f}/s" + ("" if mfu is None else f" ({mfu:.1%})")


def _mfu(found: dict[str, Any], seconds: float, peak: float | None) -> float | None:
    if peak is None:
        return None
    return float(found["flops_per_token"] * found["tokens"] / seconds / peak)


if __name__ == "__main__":
    main()
