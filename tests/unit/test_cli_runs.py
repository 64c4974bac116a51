"""The commands that look at the files of runs: ``ls``, ``status``, ``compare``, ``logs``, and ``restore`` up to its start."""

from __future__ import annotations

import html
import json
import signal
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd._util.metric_names import FIRST, in_order
from raysgd.checkpoint.storage.storage import Storage
from raysgd.cli import cluster
from raysgd.cli.main import main
from raysgd.cli.runs.finding import find_run, with_live
from raysgd.cli.runs.why import folded
from raysgd.controller.journal import journal
from raysgd.errors import ConfigError
from raysgd.goodput.spans import RankSteps, Step
from raysgd.result import RunStatus
from raysgd.runs.output import clean
from raysgd.runs.state import StateReader, read_state
from raysgd.viewer.page import live_page
from support import command
from support.run_folders import RunFolder, two_ranks

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run the command in this process, in a temporary folder; return its exit status, output and error output."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(list(words))
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A storage path with two Trainers; the newest run of ``exp`` has no end."""
    place = tmp_path / "runs"
    started = 1_000_000.0
    for name, number, losses in (("exp", 1, (3.0, 2.0)), ("other", 1, (3.0, 2.5)), ("exp", 2, (3.0,))):
        folder = RunFolder(place / name / f"run_{number:03d}")
        started += 100
        folder.describe(started=started, backend="torch", config={"lr": number}, reduce={"loss": "mean"})
        if number == 1:
            two_ranks(folder, *losses)
        else:
            folder.attempt()
            folder.reports(0, 0, {"loss": losses[0]})
            folder.reports(1, 0, {"loss": losses[0]}, {"loss": 9.0})  # its second round is not complete
    (place / "notes").mkdir()
    (place / "my own é").mkdir()
    (place / "notes.txt").touch()
    return place


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# -- ls ----------------------------------------------------------------------------------------------------------------


def test_ls_shows_all_runs_of_a_storage_path_newest_first(run: Run, runs: Path) -> None:
    status, out, err = run("ls", "runs")
    assert (status, err) == (0, "")
    head, _, *rows = rows_of(out)
    assert head == ["run", "state", "iteration", "metric", "workers", "age"]
    assert [row[:4] for row in rows] == [
        ["exp/run_002", "silent", "1", "loss=3.0"],
        ["other/run_001", "done", "2", "loss=3.75"],
        ["exp/run_001", "done", "2", "loss=3.0"],
    ]
    assert run("ls", "--storage-path", "runs")[1] == out
    assert [row[0] for row in rows_of(run("ls", "runs/exp")[1])[2:]] == ["exp/run_002", "exp/run_001"]


def test_ls_shows_the_metric_that_is_asked_for(run: Run, runs: Path) -> None:
    rows = rows_of(run("ls", "runs/exp", "--metric", "epoch")[1])[2:]
    assert [row[3] for row in rows] == ["-", "epoch=1"]


def test_ls_names_the_nearest_metric_if_no_run_has_the_one_asked_for(run: Run, runs: Path) -> None:
    status, out, err = run("ls", "runs", "--metric", "epok")
    assert status == 0 and len(rows_of(out)) == 5
    assert err == "no run has a metric epok (did you mean 'epoch'?).\n"


def test_ls_names_a_run_whose_file_is_a_link_and_lists_the_others(run: Run, runs: Path) -> None:
    (runs / "broken" / "run_001").mkdir(parents=True)
    (runs / "broken" / "run_001" / "run.json").symlink_to("nowhere")
    status, out, err = run("ls", str(runs))
    assert status == 0 and "exp/run_001" in out
    assert "broken/run_001 cannot be read: " in err and "is a symbolic link" in err


def test_ls_skips_symbolic_links_in_the_folder_of_a_trainer(run: Run, runs: Path) -> None:
    """A declarative training has links to its last and its best checkpoint there."""
    (runs / "exp" / "last").symlink_to("run_001/checkpoints/checkpoint_000002")
    (runs / "best").symlink_to("exp/run_001")
    assert [row[0] for row in rows_of(run("ls", "runs/exp")[1])[2:]] == ["exp/run_002", "exp/run_001"]
    status, out, err = run("ls", "runs")
    assert (status, len(rows_of(out)), err) == (0, 5, "")


@pytest.mark.parametrize("words", [["status"], ["compare", "runs/other"], ["report"]])
@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("run.json", '{"a": ', "run.json is damaged: it is not JSON"),
        ("run.json", "[]", "run.json is damaged: it is not a JSON object"),
        ("events.jsonl", "garbage\n", "events.jsonl is damaged: raysgd did not write the line 'garbage'"),
        ("events.jsonl", "[1]\n", "events.jsonl is damaged: raysgd did not write the line '[1]'"),
        ("events.jsonl", '{"seq":0,"attempt":1,"kind":"attempt","data":{}}\n', "the files of the run"),
        ("metrics-0000.jsonl", "garbage\n", "metrics-0000.jsonl is damaged: raysgd did not write the line 'garbage'"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(
    run: Run, runs: Path, words: list[str], file: str, content: str, text: str
) -> None:
    (runs / "exp" / "run_001" / file).write_text(content)
    status, out, err = run(*words, "runs/exp/run_001")
    assert (status, out) == (1, "") and text in err and "copy" in err
    assert len(err.splitlines()) == 1
    status, out, err = run("ls", "runs")
    assert status == 0 and [row[0] for row in rows_of(out)[2:]] == ["exp/run_002", "other/run_001"]
    assert f"{runs / 'exp' / 'run_001'} cannot be read" in err and text in err


def test_ls_prints_json(run: Run, runs: Path) -> None:
    found = json.loads(run("ls", "runs", "--json")[1])
    assert [(one["name"], one["state"], one["iteration"]) for one in found] == [
        ("exp/run_002", "silent", 1),
        ("other/run_001", "done", 2),
        ("exp/run_001", "done", 2),
    ]
    assert found[2]["metrics"]["loss"] == 3.0 and found[2]["run_dir"] == str(runs / "exp" / "run_001")


@settings(max_examples=50)
@given(
    st.lists(  # attempts: the number of reports of each rank, and whether the attempt is over
        st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.booleans()), min_size=1, max_size=3
    ),
    st.integers(1, 3),
    st.sampled_from([{}, {"loss": "mean"}]),
    st.sampled_from([16, 100, 65536]),
)
def test_last_round_is_that_of_the_whole_journal(
    tmp_path_factory: pytest.TempPathFactory, attempts: Any, batch: int, reduce: dict[str, str], block: int
) -> None:
    """It is read from the ends of the files where that is enough, at once or as the files grow."""
    run = RunFolder(tmp_path_factory.mktemp("runs") / "run_001")
    run.describe(reduce=reduce)
    folder = Storage.from_uri(run.path)
    growing = StateReader(folder)
    for number, (counts, is_over) in enumerate(attempts, 1):
        run.attempt(number, world_size=len(counts), before=10 * number)
        for first in range(0, max(counts), batch):
            for rank, count in enumerate(counts):
                rows = [{"loss": float(100 * rank + step)} for step in range(first, min(first + batch, count))]
                if rows:
                    run.reports(rank, first, *rows, attempt=number, segment=number)
            growing.read()
        if is_over or number < len(attempts):
            for rank in range(len(counts)):
                run.frame("rank_done", attempt=number, rank=rank)
            run.frame("attempt_end", {"keep_rounds": None if is_over else min(counts)}, attempt=number)
    whole = run.load().metrics
    with mock.patch.object(journal, "_BLOCK_BYTES", block):
        state = read_state(folder)
        assert growing.read() == state
    expected = dict(whole.iloc[-1]) if len(whole) else {}
    names = [name for name in expected if name != "time_this_iter_s"]
    assert {name: state.metrics[name] for name in names} == {name: expected[name] for name in names}
    assert bool(state.metrics) == bool(expected)


def test_ls_names_a_run_with_damaged_files_and_shows_the_others(run: Run, runs: Path) -> None:
    (runs / "exp" / "run_001" / "run.json").write_text("{")
    status, out, err = run("ls", "runs")
    assert status == 0 and "exp/run_001 cannot be read" in err
    assert [row[0] for row in rows_of(out)[2:]] == ["exp/run_002", "other/run_001"]


def test_ls_of_nothing_says_where_it_looked(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert run("ls", "empty") == (0, "", f"there are no runs in {tmp_path / 'empty'}.\n")
    assert run("ls", "empty", "--json") == (0, "[]\n", "")


def test_live_runs_have_the_state_that_the_cluster_says(runs: Path) -> None:
    states = [read_state_of(runs / "exp" / "run_002"), read_state_of(runs / "exp" / "run_001")]
    here = RunStatus("recovering", "run_002", str(runs / "exp" / "run_002"), world_size=2, iteration=7, num_failures=1)
    elsewhere = RunStatus("running", "run_005", "s3://bucket/far/run_005", iteration=3)
    over = RunStatus("done", "run_001", "/gone/exp/run_001")
    trainers = [
        cluster.LiveTrainer("exp", "a program", here),
        cluster.LiveTrainer(None, "a notebook", elsewhere),
        cluster.LiveTrainer(None, "another", over),
        cluster.LiveTrainer(None, "one that does not answer", None),
    ]
    merged = with_live(states, trainers)
    assert [(one.name, one.state, one.alias, one.iteration) for one in merged] == [
        ("far/run_005", "running", None, 3),
        ("exp/run_002", "recovering", "exp", 1),
        ("exp/run_001", "done", None, 2),
    ]
    assert merged[1].metrics["loss"] == 3.0 and merged[1].num_failures == 1
    assert [one.is_live for one in merged] == [True, True, False]


def read_state_of(path: Path) -> Any:
    return read_state(find_run(str(path), "runs"))


# -- runs by name ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("runs/exp/run_001", "exp/run_001"),
        ("runs/exp", "exp/run_002"),
        ("exp", "exp/run_002"),
        ("exp/run_001", "exp/run_001"),
        ("other", "other/run_001"),
    ],
)
def test_run_is_a_folder_or_a_name(run: Run, runs: Path, given: str, found: str) -> None:
    assert find_run(given, str(runs)).uri == str(runs / found)


@pytest.mark.parametrize("given", ["exq", "exp/run_009", "notes", "../runs", "/missing"])
def test_run_that_is_not_there_is_refused(run: Run, runs: Path, given: str) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        find_run(given, str(runs))


def test_ls_shows_the_metric_that_the_page_shows_first(run: Run, runs: Path) -> None:
    folder = RunFolder(runs / "ordered" / "run_001")
    folder.attempt(world_size=1)
    folder.reports(
        0, 0, {"epoch": 3, "step": 9, "width": 2.0, "lr": 0.1, "acc": 0.9, "val": {"LOSS": 0.5}, "name": "error"}
    )
    assert "val/LOSS=0.5" in run("ls", "runs/ordered")[1]
    ordered = ["val/LOSS", "acc", "lr", "width", "val/epoch", "step"]
    assert in_order(["val/epoch", "width", "lr", "acc", "val/LOSS", "step"])[:4] == ordered[:4]
    assert html.escape(json.dumps(FIRST, separators=(",", ":"))) in live_page("runs", "token", is_editable=False)


def test_names_are_whole_in_narrow_terminals(run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a_name_that_is_longer_than_the_terminal_is_wide"
    RunFolder(runs / name / "run_001").event("run_start")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert f"{name}/run_001 " in run("ls", f"runs/{name}")[1]
    status, out, _ = run("annotate", f"runs/{name}", "--notes", "word " * 40)
    assert status == 0 and max(map(len, out.splitlines())) < 80, "long texts are folded"


# -- status ------------------------------------------------------------------------------------------------------------


def test_status_shows_what_the_files_say(run: Run, runs: Path) -> None:
    folder = RunFolder(runs / "failed" / "run_001")
    folder.describe(started=100.0, backend="torch", num_workers=2, command_line=["run", "train.py"], config={"lr": 1})
    folder.attempt()
    folder.event("attempt_start", attempt=1, world_size=2)
    folder.reports(0, 0, {"loss": 1.5, "val": {"acc": 0.25}})
    folder.reports(1, 0, {"loss": 2.5})
    folder.event("failure", error="rank 1 died", action="retry", ranks=[1])
    folder.event("run_end", kind="error", message="ValueError: bad row\nmore")
    status, out, _ = run("status", "failed", "--storage-path", "runs")
    assert status == 0
    facts = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line}
    assert facts["state"] == "error: ValueError: bad row"
    assert facts["iteration"] == "1" and facts["failures"] == "1" and facts["workers"] == "2 x torch"
    assert facts["metrics"] == "loss=1.5 val/acc=0.25"
    assert facts["goodput"] == "0%: raysgd why failed/run_001", "no rank has entered train_func"
    assert "rank 1 died" in out
    shown = json.loads(run("status", "failed", "--storage-path", "runs", "--json")[1])
    assert shown["message"] == "ValueError: bad row\nmore" and shown["command_line"] == ["run", "train.py"]
    assert [event["kind"] for event in shown["events"]] == ["failure"]
    assert "live in another one, or lost" in run("status", "exp", "--storage-path", "runs")[1]


# -- why -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_terminal", "width"), [(True, 60), (True, 20), (False, 60)])
def test_findings_are_folded_to_the_width_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: is_terminal))
    indent, line = " " * 20, "1  straggler  33%   " + "rank 1 computes longer. " * 6
    first, *others = folded(line, indent).splitlines()
    assert " ".join([first, *others]).split() == line.split()
    if is_terminal and width == 60:
        assert others and max(map(len, (first, *others))) <= width
        assert all(each.startswith(indent) for each in others)
    else:
        assert not others, "no terminal, or one that is too narrow"


# -- trace -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "junk", "other content", "no events"])
def test_damaged_files_of_a_trace_are_named(run: Run, runs: Path, damage: str) -> None:
    step = Step(3, 2, ((1_000_000, "training"),), 2_000_000)
    content = RankSteps(1, 0, "node", 0, 0.0, None, True, (step,)).encode()
    damaged = {"cut": content[:-30], "junk": b"junk", "other content": zlib.compress(b"[1]"), "no events": content}
    folder = runs / "exp" / "run_001"
    (folder / "trace").mkdir()
    (folder / "trace" / "attempt_0001_rank_00000.json.gz").write_bytes(damaged[damage])
    if damage == "no events":
        (folder / "events.jsonl").write_text("")
    status, out, err = run("trace", "runs/exp/run_001", "-o", str(runs / "out.json"))
    assert (status, out) == (1, "") and "is damaged" in err and "Traceback" not in err


# -- compare -----------------------------------------------------------------------------------------------------------


def test_compare_shows_the_first_difference(run: Run, runs: Path) -> None:
    status, out, _ = run("compare", "exp/run_001", "other", "--storage-path", "runs")
    assert status == 1
    first, *rows = out.splitlines()
    assert first == "first difference at iteration 2, rank 0"
    assert ["metric", "loss", "2.0", "2.5"] in [row.split() for row in rows]
    shown = json.loads(run("compare", "exp/run_001", "other", "--storage-path", "runs", "--json")[1])
    assert (shown["iteration"], shown["rank"], shown["metrics"]) == (2, 0, {"loss": [2.0, 2.5]})


def test_compare_shows_entries_of_nested_configs_that_differ(run: Run, runs: Path) -> None:
    for name, lr in (("exp", 0.1), ("other", 0.2)):
        config = {"optimizer": {"type": "SGD", "args": {"lr": lr}}, "hook": None if lr == 0.1 else {"type": "my.Hook"}}
        (runs / name / "run_001" / "run.json").write_text(json.dumps({"config": config}))
    rows = rows_of(run("compare", "exp/run_001", "other", "--storage-path", "runs")[1])
    assert ["config", "optimizer.args.lr", "0.1", "0.2"] in rows
    assert ["config", "hook", "None", "{'type':", "'my.Hook'}"] in rows
    assert not any("optimizer.type" in row for row in rows)


def test_compare_of_equal_runs_is_a_success(run: Run, runs: Path) -> None:
    words = ["exp/run_001", "other", "--storage-path", "runs"]
    assert run("compare", *words, "--ignore", "loss")[:2] == (0, "equal in all 2 iterations\n")
    assert run("compare", *words, "--rel-tol", "0.3")[0] == 0


# -- logs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def printed(runs: Path, tmp_path: Path) -> RunFolder:
    """A run of two ranks in two attempts. Rank 1 died in the first; rank 0's process had printed before and after the run."""
    folder = RunFolder(runs / "printed" / "run_001")
    node = f"{socket.gethostname()} (10.0.0.1)"

    def file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    def enter(kind: str, attempt: int, rank: int, *output: tuple[str, int]) -> None:
        folder.event(kind, rank=rank, attempt=attempt, output=[list(one) for one in output])

    out = [file("0.out", "before\none\n:actor_name:rank 0\ntwo\nafter"), file("1.out", "uno\nunfinished")]
    err = [file("0.err", ""), file("1.err", "::raysgd-output:abc:1:1:2:begin\nwarned\n")]
    again = file("2.out", "due\n")
    for rank in (0, 1):
        folder.event("worker_up", rank=rank, node=node, node_id="n1", pid=rank)
    folder.attempt(1)
    enter("entered", 1, 0, (out[0], 7), (err[0], 0))
    enter("entered", 1, 1, (out[1], 0), (err[1], 0))
    enter("left", 1, 0, (out[0], 11), (err[0], 0))
    folder.event("worker_up", rank=1, node=node, node_id="n1", pid=2)
    enter("entered", 2, 0, (out[0], 11), (err[0], 0))
    enter("entered", 2, 1, (again, 0), (err[0], 0))
    enter("left", 2, 0, (out[0], 34), (err[0], 0))
    enter("left", 2, 1, (again, 4), (err[0], 0))
    folder.event("run_end", kind="done", message="")
    return folder


def test_logs_are_what_each_rank_printed_in_its_attempts(run: Run, printed: RunFolder) -> None:
    status, out, err = run("logs", "printed", "--storage-path", "runs")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "(rank 0) one",
        "(rank 1, stderr) warned",
        "(rank 1) uno",
        "(rank 1) unfinished",
        "(rank 0) two",
        "(rank 1) due",
    ]
    followed = run("logs", "printed", "--storage-path", "runs", "-f")
    assert followed[:2] == (0, out)


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (["--rank", "0"], ["one", "two"]),
        (["--rank", "1", "--attempt", "1", "--stream", "stdout"], ["uno", "unfinished"]),
        (["--attempt", "2"], ["(rank 0) two", "(rank 1) due"]),
    ],
)
def test_logs_of_a_rank_or_an_attempt(run: Run, printed: RunFolder, flags: list[str], lines: list[str]) -> None:
    assert run("logs", "printed", "--storage-path", "runs", *flags)[1].splitlines() == lines


def test_logs_print_json_lines(run: Run, printed: RunFolder) -> None:
    out = run("logs", "printed", "--storage-path", "runs", "--attempt", "2", "--json")[1]
    assert [json.loads(line) for line in out.splitlines()] == [
        {"attempt": 2, "rank": 0, "stream": "stdout", "line": "two"},
        {"attempt": 2, "rank": 1, "stream": "stdout", "line": "due"},
    ]


def test_logs_that_are_gone_are_named(run: Run, printed: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "0.out").unlink()
    status, out, err = run("logs", "printed", "--storage-path", "runs", "--stream", "stdout")
    assert status == 1 and "(rank 1) due" in out
    assert "0.out on " in err and "is gone" in err and err.count("\n") == 1


def test_logs_on_another_node_need_its_cluster(run: Run, runs: Path) -> None:
    folder = RunFolder(runs / "far" / "run_001")
    folder.event("worker_up", rank=0, node="elsewhere (10.0.0.9)", node_id="n9", pid=1)
    folder.event("entered", rank=0, attempt=1, output=[["/tmp/x.out", 0], ["/tmp/x.err", 0]])
    status, _, err = run("logs", "far", "--storage-path", "runs")
    assert status == 1 and err.count("is on elsewhere (10.0.0.9), and there is no cluster to ask for it") == 1


def test_logs_that_were_never_recorded_are_explained(run: Run, printed: RunFolder) -> None:
    assert "do not say where its output is" in run("logs", "other", "--storage-path", "runs")[2]
    status, _, err = run("logs", "printed", "--storage-path", "runs", "--rank", "5")
    assert status == 2 and "has no output of --rank 5; it has ranks [0, 1] and attempts [1, 2]" in err


def test_ctrl_c_ends_the_output_of_a_live_run(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("one\n")
    folder = RunFolder(runs / "live" / "run_001")
    folder.event("worker_up", rank=0, node=f"{socket.gethostname()} (10.0.0.1)", node_id="n1", pid=1)
    folder.event("entered", rank=0, attempt=1, output=[[str(tmp_path / "out"), 0], [str(tmp_path / "err"), 0]])
    process = command.start(None, tmp_path, "logs", "runs/live", "-f", "--stream", "stdout")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "(rank 0) one\n"
        with open(tmp_path / "out", "a") as file:
            file.write("two\n")
        assert process.stdout.readline() == "(rank 0) two\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, err.strip()) == (130, "")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"text", "text"),
        (b":actor_name:WorkerActor", None),
        (b"::raysgd-output:t:1:0:2:end", None),
        (b"no newline::raysgd-output:t:1:0:2:end", "no newline"),
        (b"\xff\r", "\ufffd"),
        (b"", ""),
    ],
)
def test_lines_of_the_system_are_not_output(line: bytes, text: str | None) -> None:
    assert clean(line) == text


# -- restore -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("description", "words", "text"),
    [
        ({"command": ["train.py", "--x"]}, [], "was not started by the command raysgd, but by train.py --x"),
        ({"command_line": ["run", "--env", "API_KEY=***", "train.py"]}, [], "holds secrets"),
        ({"command_line": ["run", "train.py"], "folder": "/missing"}, [], "the working folder of r cannot be entered"),
        ({"command_line": ["fly", "train.py"]}, [], "raysgd fly is not a command of this version"),
        ({"command_line": ["ls"]}, [], "runs of `raysgd ls` are not restored by this command"),
        ({"command_line": ["run", "train.py"]}, [], "the script train.py cannot be read"),
        ({"command_line": ["run", "train.py"]}, ["--num-worker", "2"], "did you mean '--num-workers'?"),
        ({"command_line": ["run", "train.py"]}, ["other.py"], "other.py is not a flag"),
        (
            {"command_line": ["run", "--num-workers", "2", "train.py"]},
            ["--num-workers", "x"],
            "'x' is not a valid integer",
        ),
    ],
)
def test_run_that_cannot_be_restored_is_explained(
    run: Run, runs: Path, description: dict[str, Any], words: list[str], text: str
) -> None:
    RunFolder(runs / "r" / "run_001").describe(**description)
    status, _, err = run("restore", "--storage-path", str(runs), "r", *words)
    assert status == 2 and text in err


# -- commands that need a cluster --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attach", "pause", "resume", "stop"])
def test_control_of_a_run_needs_a_cluster(run: Run, name: str) -> None:
    status, _, err = run(name, "exp")
    assert status == 2 and "there is no Ray cluster to ask; give --address HOST:PORT" in err
    status, _, err = run(name, "exp", "--address", "127.0.0.1:1")
    assert status == 2 and "there is no Ray cluster at --address 127.0.0.1:1" in err


def test_noted_cluster_is_that_of_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command reads the file in which Ray notes the address of a cluster, without importing Ray."""
    from ray._private import utils

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster.find_address(None) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        utils.write_ray_address(address, str(tmp_path / "ray"))
        assert cluster.find_address(None) == cluster.find_address("auto") == address
    assert cluster.find_address(None) is None, "nothing listens there any more"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ls", "missing"], "there is no folder missing; give one that holds runs"),
        (["ls", "--jsno"], "Did you mean '--json'"),
        (["ls", "--address", "local"], "--address local starts a new cluster"),
        (["status"], "Missing argument 'RUN'; `raysgd status --help` shows what to give."),
        (["ls", "runs/notes.txt"], "runs/notes.txt is a file; give a folder"),
        (["status", "runs/notes.txt"], "runs/notes.txt is a file; give a folder"),
        (["status", "notes.txt", "--storage-path", "runs"], "there is no run notes.txt"),
        (["compare", "exp", "exp", "--rel-tol", "x"], "'x' is not a valid number"),
        (["logs", "exp", "--rank", "x"], "'x' is not a valid integer;"),
        (["status", "exq"], "there is no run exq: it is neither the folder of a run, nor a name in "),
        (["status", "exq", "--storage-path", "runs"], "(did you mean 'exp'?)"),
        (["status", "nothing://x"], "give a path or a URI of pyarrow.fs"),
        (["logs", "exp", "--rank", "-1", "--storage-path", "runs"], "-1 is not in the range x>=0"),
        (["logs", "exp", "--stream", "out", "--storage-path", "runs"], "'out' is not one of 'stdout', 'stderr'"),
        (["compare", "exp", "--storage-path", "runs"], "Missing argument 'B'"),
        (["compare", "exp", "exq", "--storage-path", "runs"], "there is no run exq"),
        (["attach", "exp", "--progress", "bar"], "'bar' is not one of 'auto', 'live', 'lines', 'off'"),
        (["pause"], "Missing argument 'NAME'"),
        (["doctor", "now"], "Got unexpected extra argument (now)"),
        (["restore", "exq"], "there is no run exq"),
    ],
)
def test_wrong_argument_is_explained(run: Run, runs: Path, words: list[str], text: str) -> None:
    status, out, err = run(*words)
    assert (status, out) == (2, "") and text in err and "Traceback" not in err
