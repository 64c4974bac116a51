"""``raysgd trace``: writes the steps of all ranks on one clock, as a file for Perfetto. Driver side; no Ray is started."""

from __future__ import annotations

import gzip
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raysgd.cli.console import FAILED, SUCCEEDED, address_flag, json_flag, print_error, print_json, storage_flag
from raysgd.cli.flags import Parsed
from raysgd.cli.runs.completing import run_argument
from raysgd.cli.runs.finding import find_run
from raysgd.errors import CheckpointCorruptError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from raysgd.checkpoint.storage.storage import Storage
    from raysgd.goodput.spans import RankSteps

#: How many files are read at once.
_NUM_READERS = 16


def _parse_steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
        raise ConfigError("this is not a range of steps: give 100-110, or 100 for one step")
    return int(first), int(last or first)


@click.command("trace")
@run_argument()
@click.option(
    "--steps",
    type=Parsed(_parse_steps, "FIRST-LAST"),
    metavar="FIRST-LAST",
    help="The steps (default: the newest 100).",
)
@click.option("--attempt", type=int, help="The attempt (default: the newest one that has these steps).")
@click.option("-o", "--output", metavar="FILE", help="The file; compressed if its name ends with .gz.")
@storage_flag
@address_flag
@json_flag
def command(
    run: str,
    steps: tuple[int, int] | None,
    attempt: int | None,
    output: str | None,
    storage_path: str,
    address: str | None,
    as_json: bool,
) -> int:
    """Write what each rank did in some steps of RUN, and what happened meanwhile, as a file for https://ui.perfetto.dev.

    RUN is as for `raysgd why`. Steps are counted from the beginning of the run: by the batches or by the reports, whichever
    the loop makes more often, and in a script for torchrun by its optimizer. Of a long run, the first and the newest steps are
    kept, and some between.
    """
    from raysgd.runs.finding import run_name
    from raysgd.runs.reading import read_events
    from raysgd.viewer.trace import NUM_NEWEST, choose_steps, count_before, distance, make_trace

    folder = find_run(run, storage_path, address)
    found = _list_files(folder, attempt)
    kept_by_attempt = {}
    for number in sorted(found, reverse=True):
        (rank,) = _read(folder, found[number][:1])
        before = count_before([rank])
        kept_by_attempt[number] = [step.number + before for step in rank.steps]
    first, last = steps or next((kept[-NUM_NEWEST:][0], kept[-1]) for kept in kept_by_attempt.values())
    choices = {number: choose_steps(kept, first, last) for number, kept in kept_by_attempt.items()}
    number = min(choices, key=lambda number: distance(choices[number], first, last))
    chosen, kept = choices[number], kept_by_attempt[number]
    ranks = _read(folder, found[number])
    if not (events := read_events(folder)):
        raise CheckpointCorruptError(f"{folder.path_of('events.jsonl')} is damaged: it has no events")
    trace = make_trace(events, ranks, frozenset(chosen))
    default = f"{run_name(folder).replace('/', '-')}-steps-{chosen[0]}-{chosen[-1]}.json.gz"
    path = Path(output or default).expanduser().absolute()
    try:
        data = json.dumps(trace, separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        print_error(f"raysgd trace: {path} could not be written: {error}")
        return FAILED
    if as_json:
        meta = {**trace["otherData"], "ranks": [rank.rank for rank in ranks]}
        print_json({"file": str(path), "steps": chosen, "kept": kept, **meta})
        return SUCCEEDED
    if steps is not None and chosen != list(range(first, last + 1)):
        some = "not all" if any(first <= each <= last for each in chosen) else "none"
        print(f"Of steps {first}-{last}, {some} are kept. Kept in attempt {number}: {_ranges(kept)}.")
    errors = trace["otherData"]["clock_error_ms"]
    known = [f"{node} " + ("by its own clock" if ms is None else f"±{ms:.1f} ms") for node, ms in errors.items()]
    clocks = f"; clocks: {', '.join(known)}" if len(known) > 1 else ""
    print(f"steps {_ranges(chosen)} of attempt {number} on {len(ranks)} ranks{clocks}")
    print(f"{output or default}: open it at https://ui.perfetto.dev")
    return SUCCEEDED


def _list_files(folder: Storage, attempt: int | None) -> dict[int, list[str]]:
    """Return the names of the files of each attempt, or only of that one, by rank.

    Raises:
        ConfigError: There are none.
    """
    from raysgd.goodput.spans import FOLDER, parse_name

    names = folder.child(FOLDER).list_names() if folder.is_folder(FOLDER) else []
    found: dict[int, list[str]] = {}
    for name in sorted(names):
        if parsed := parse_name(name):
            found.setdefault(parsed[0], []).append(name)
    if not found:
        raise ConfigError(
            f"{folder.path_of('')} has no steps: its workers write them after each minute and when they leave train_func, if "
            "the loop reports, or reads batches by raysgd, or is that of a script for torchrun. `raysgd why` shows what is known "
            "without steps."
        )
    if attempt is not None and attempt not in found:
        raise ConfigError(f"attempt {attempt} has no steps; give one of {', '.join(map(str, sorted(found)))}.")
    return {attempt: found[attempt]} if attempt is not None else found


def _read(folder: Storage, names: Iterable[str]) -> list[RankSteps]:
    from raysgd.goodput.spans import FOLDER, RankSteps

    files = folder.child(FOLDER)

    def read(name: str) -> RankSteps:
        try:
            return RankSteps.decode(files.read_bytes(name))
        except (zlib.error, ValueError, TypeError, LookupError) as error:
            raise CheckpointCorruptError(f"{files.path_of(name)} is damaged: {error}") from error

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        return list(pool.map(read, names))


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers in ascending order as text, such as ``1-16, 33-48``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
