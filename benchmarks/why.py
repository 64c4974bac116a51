"""Does `raysgd why` name the cause? Trainings with a cause of slowness in three strengths each, and healthy ones.

    python benchmarks/why.py [--quick] [--only CAUSE] [--output FOLDER]

Writes why.json and why.md to doc/benchmarks, or to build/benchmarks with --quick. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from bench.machine import ROOT, describe_machine
from bench.results import rounded
from bench.systems.base import wait_for_calm
from bench.table import make_table, say_met
from bench.why_causes import CAUSES, Blocking, Cause, start_burners
from bench.why_healthy import COMMANDS, HEALTHY, Healthy, data

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
STRENGTHS = ("weak", "medium", "strong")
#: First findings that are right; findings in healthy runs; how far a predicted gain may be from what the remedy brought.
RIGHT_SHARE, NUM_FALSE, GAIN_POINTS = 0.95, 0, 0.10
#: Healthy runs of each function, and of each command.
NUM_HEALTHY, NUM_COMMANDS = 4, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one strength of each: does it all work?")
    parser.add_argument("--only", help="one cause")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    output.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"measured": date.today().isoformat()}
    with tempfile.TemporaryDirectory() as folder:
        document |= measure(Path(folder), quick=args.quick, only=args.only)
    document["machine"] = describe_machine(("jax", "tensorflow"))
    (output / "why.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = render(document)
    (output / "why.md").write_text(page, encoding="utf-8")
    print(page)


def measure(folder: Path, *, quick: bool, only: str | None) -> dict[str, Any]:
    import ray

    os.environ.update(RAY_worker_niceness="0", PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    found: dict[str, Any] = {"causes": {}, "healthy": {}}
    try:
        wait_for_calm()
        for backend, num_workers in sorted({(cause.backend, cause.num_workers) for cause in CAUSES.values()}):
            with _make_trainer(folder, backend, num_workers) as trainer:
                for name, cause in CAUSES.items():
                    if only in (None, name) and (cause.backend, cause.num_workers) == (backend, num_workers):
                        chosen = range(2, 3) if quick else range(3)
                        found["causes"][name] = [_try(trainer, cause, each, folder) for each in chosen]
                        print(name, json.dumps(found["causes"][name], indent=1), flush=True)
        for backend, num_workers in sorted({(each.backend, each.num_workers) for each in HEALTHY.values()}):
            if only is not None:
                break
            with _make_trainer(folder, backend, num_workers) as trainer:
                for name, each in HEALTHY.items():
                    if (each.backend, each.num_workers) == (backend, num_workers):
                        found["healthy"][name] = _repeat_healthy(trainer, each, 1 if quick else NUM_HEALTHY)
                        print(name, json.dumps(found["healthy"][name], indent=1), flush=True)
    finally:
        ray.shutdown()
    for name, run in COMMANDS.items() if only is None else ():
        found["healthy"][name] = []
        for number in range(1 if quick else NUM_COMMANDS):
            place = folder / f"{run.__name__}_{number}"
            place.mkdir()
            found["healthy"][name].append(_why(run(place)))
        print(name, json.dumps(found["healthy"][name], indent=1), flush=True)
    return found


def _make_trainer(folder: Path, backend: str, num_workers: int) -> Any:
    """Return a Trainer whose workers are up."""
    import raysgd

    files = raysgd.RunConfig(storage_path=folder / "runs")
    failures = raysgd.FailureConfig(max_failures=10)
    trainer = raysgd.Trainer(num_workers, backend=backend, run_config=files, failure_config=failures)
    trainer.start()
    return trainer


def _repeat_healthy(trainer: Any, healthy: Healthy, number: int) -> list[list[dict[str, Any]]]:
    """Run a healthy training some times; the first one, which imports what it needs, does not count."""
    found = []
    dataset = data(healthy.num_workers) if healthy.uses_data else None
    for _ in range(1 + number):
        trainer.run(healthy.train, {"uses_data": healthy.uses_data}, dataset=dataset)
        found.append(_why(trainer.run_dir))
    return found[1:]


def _try(trainer: Any, cause: Cause, strength: int, folder: Path) -> dict[str, Any]:
    """Run a training with the cause, and one with its remedy."""
    mark = folder / f"{id(cause)}_{strength}"
    mark.mkdir()
    config = {**cause.configs[strength], "mark": str(mark)}
    burners = start_burners(cause.burners[strength])
    try:
        slow_s = _run(trainer, cause, config)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    findings = _why(trainer.run_dir)
    fast_s = None if cause.remedy is None else _run(trainer, cause, {**config, **cause.remedy})
    return {
        "found": [{key: each[key] for key in ("cause", "share", "text", "gain")} for each in findings],
        "is_right": bool(findings) and findings[0]["cause"] == cause.finding,
        "step_ms": rounded(1000 * slow_s),
        "step_ms_with_remedy": None if fast_s is None else rounded(1000 * fast_s),
    }


def _run(trainer: Any, cause: Cause, config: dict[str, Any]) -> float:
    callbacks = [Blocking(config["callback_s"])] if config.get("callback_s") else []
    return float(trainer.run(cause.train, config, callbacks=callbacks))


def _why(run: Any) -> list[dict[str, Any]]:
    from raysgd.checkpoint.storage.storage import Storage
    from raysgd.goodput.evidence import Evidence
    from raysgd.goodput.findings import find_causes
    from raysgd.goodput.rules import RULES
    from raysgd.runs.reading import read_events

    evidence = Evidence.of(read_events(Storage.from_uri(str(run))))
    shutil.rmtree(Path(run, "checkpoints"), ignore_errors=True)  # tens of gigabytes
    return [vars(finding) for finding in find_causes(evidence, RULES)]


# -- the page ----------------------------------------------------------------------------------------------------------


def render(document: dict[str, Any]) -> str:
    """Return the page."""
    rows, right, total = [], 0, 0
    gains: list[float] = []
    for name, tries in document["causes"].items():
        for strength, each in zip(STRENGTHS[-len(tries) :], tries, strict=True):
            total, right = total + 1, right + each["is_right"]
            first = each["found"][0] if each["found"] else None
            expected, brought = None, None
            if each["step_ms_with_remedy"] and first is not None and each["is_right"] and first["gain"]:
                expected, brought = first["gain"], each["step_ms"] / each["step_ms_with_remedy"]
                gains.append(abs(expected - brought) / brought)
            rows.append(
                [
                    name,
                    strength,
                    f"{each['step_ms']:.1f} ms",
                    "-" if first is None else f"{first['cause']}, {first['share']:.0%}",
                    "yes" if each["is_right"] else "**no**",
                    "-" if expected is None else f"{expected:.2f}x",
                    "-" if brought is None else f"{brought:.2f}x",
                ]
            )
    false = [(name, each) for name, runs in document["healthy"].items() for found in runs for each in found]
    misses = [
        f"- A healthy run ({name}) had: {each['cause']}, {each['share']:.0%}: {each['text']}" for name, each in false
    ]
    num_healthy = sum(map(len, document["healthy"].values()))
    within = sum(each <= GAIN_POINTS for each in gains)
    machine = document["machine"]
    return "\n".join(
        [
            "# Why is it slow?",
            "",
            "<!-- Written by benchmarks/why.py; changes made here are lost. -->",
            "",
            "Trainings with a cause of slowness put into them, in three strengths each, and what `raysgd why` finds first "
            "([guide](../guides/why.md)).",
            f"Two workers on {machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB; "
            + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
            + ".",
            "",
            f"- First finding right: {right} of {total}; the target is {RIGHT_SHARE:.0%}: "
            f"{say_met(right >= RIGHT_SHARE * total)}.",
            f"- Findings in {num_healthy} healthy runs by {len(document['healthy'])} doors and backends "
            f"({', '.join(document['healthy'])}): {len(false)}; the target is none: {say_met(not false)}.",
            f"- Predicted gain within {GAIN_POINTS:.0%} of what the remedy brought: {within} of {len(gains)}: "
            f"{say_met(within == len(gains))}.",
            *misses,
            "",
            make_table(["cause", "strength", "step", "found first", "right", "expected", "the remedy brought"], rows),
            "",
            f"Measured on {document['measured']}, on a machine that had become calm.",
            "",
            "```console",
            "$ python benchmarks/why.py",
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    main()
