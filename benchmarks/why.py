"""Does `raysgd why` name the cause? Trainings with a cause of slowness in three strengths each, and healthy ones.

    python benchmarks/why.py [--quick] [--only CAUSE] [--output FOLDER]

Writes why.json and why.md to doc/benchmarks, or to build/benchmarks with --quick. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from bench.machine import ROOT, describe_machine
from bench.results import rounded
from bench.systems.base import wait_for_calm
from bench.table import make_table, say_met
from bench.why_causes import CAUSES, Blocking, Cause, compile_again, start_burners, train

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
STRENGTHS = ("weak", "medium", "strong")
#: First findings that are right; findings in healthy runs; how far a predicted gain may be from what the remedy brought.
RIGHT_SHARE, NUM_FALSE, GAIN_POINTS = 0.95, 0, 0.10
NUM_HEALTHY = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one strength of each: does it all work?")
    parser.add_argument("--only", help="one cause")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    output.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"measured": date.today().isoformat(), "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as folder:
        document |= measure(Path(folder), quick=args.quick, only=args.only)
    document["machine"] = describe_machine(("jax",))
    (output / "why.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = render(document)
    (output / "why.md").write_text(page, encoding="utf-8")
    print(page)


def measure(folder: Path, *, quick: bool, only: str | None) -> dict[str, Any]:
    import ray

    import raysgd

    os.environ.update(RAY_worker_niceness="0", PYTHONPATH=str(ROOT / "benchmarks"))
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    found: dict[str, Any] = {"causes": {}, "healthy": []}
    trainers: dict[str, Any] = {}

    def trainer_for(backend: str) -> Any:
        if backend not in trainers:
            files = raysgd.RunConfig(storage_path=folder / "runs")
            failures = raysgd.FailureConfig(max_failures=10)
            workers = 1 if backend == "jax" else 2
            trainers[backend] = raysgd.Trainer(workers, backend=backend, run_config=files, failure_config=failures)
            trainers[backend].start()
        return trainers[backend]

    try:
        wait_for_calm()
        for name, cause in CAUSES.items():
            if only in (None, name):
                chosen = range(2, 3) if quick else range(3)
                found["causes"][name] = [_try(trainer_for(cause.backend), cause, each, folder) for each in chosen]
        for number in range(2 if quick else NUM_HEALTHY):
            backend = ("torch", "torch", "jax")[number % 3]
            function, config = (compile_again, {"stride": 1000}) if backend == "jax" else (train, {})
            trainer_for(backend).run(function, config)
            found["healthy"].append([each for each in _why(trainer_for(backend)) if each["cause"] != "start"])
    finally:
        for trainer in trainers.values():
            trainer.shutdown()
        ray.shutdown()
    return found


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
    findings = _why(trainer)
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


def _why(trainer: Any) -> list[dict[str, Any]]:
    from raysgd.checkpoint.storage.storage import Storage
    from raysgd.goodput.evidence import Evidence
    from raysgd.goodput.findings import find_causes
    from raysgd.goodput.rules import RULES
    from raysgd.runs.reading import read_events

    evidence = Evidence.of(read_events(Storage.from_uri(str(trainer.run_dir))))
    return [vars(finding) for finding in find_causes(evidence, RULES)]


# -- the page ----------------------------------------------------------------------------------------------------------


def render(document: dict[str, Any]) -> str:
    """Return the page."""
    rows, right, total, misses = [], 0, 0, []
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
    false = [each for found in document["healthy"] for each in found]
    misses = [f"- A healthy run had: {each['cause']}, {each['share']:.0%}: {each['text']}" for each in false]
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
            f"- Findings in {len(document['healthy'])} healthy runs: {len(false)}; the target is none: {say_met(not false)}.",
            f"- Predicted gain within {GAIN_POINTS:.0%} of what the remedy brought: {within} of {len(gains)}: "
            f"{say_met(within == len(gains))}.",
            *misses,
            "",
            make_table(["cause", "strength", "step", "found first", "right", "expected", "the remedy brought"], rows),
            "",
            f"Measured on {document['measured']}; the load average was {document['load']} when it began.",
            "",
            "```console",
            "$ python benchmarks/why.py",
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    main()
