"""Reading what workers printed, in parts of any size, gives each line once, with its place."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from raysgd.runs import output
from raysgd.runs.output import Part, read_lines

TEXTS = st.lists(
    st.text(st.characters(blacklist_characters="\n\r:", blacklist_categories=("Cs",)), max_size=12), max_size=20
)


def read_all(data: bytes, part: Part, begin: int, *, aligns: bool, size: int) -> list[tuple[int, str]]:
    """Read a part as the page does: again from where the last answer ended, until nothing is new."""
    lines: list[tuple[int, str]] = []
    with mock.patch.object(output, "_CHUNK_BYTES", size):
        while True:
            found, end = read_lines(lambda part, begin: data[begin : begin + size], part, begin, aligns=aligns)
            lines += found
            if end == begin:
                return lines
            begin, aligns = end, False


def part_of(data: bytes, *, is_over: bool) -> Part:
    return Part(1, 0, "stdout", "here", "", "/x", 0, len(data) if is_over else None)


@given(TEXTS, st.integers(64, 200))
def test_lines_are_read_whole_whatever_the_size_of_a_read(texts: list[str], size: int) -> None:
    data = "".join(f"{text}\n" for text in texts).encode()
    lines = read_all(data, part_of(data, is_over=True), 0, aligns=False, size=size)
    assert [text for _, text in lines] == texts
    assert all(data[place:].startswith(text.encode()) for place, text in lines)


@given(
    TEXTS, st.text(st.characters(blacklist_characters="\n\r:", blacklist_categories=("Cs",)), min_size=1, max_size=9)
)
def test_unfinished_line_is_shown_when_the_part_is_over(texts: list[str], last: str) -> None:
    data = "".join(f"{text}\n" for text in [*texts, last]).removesuffix("\n").encode()
    for is_over, expected in ((True, [*texts, last]), (False, texts)):
        lines = read_all(data, part_of(data, is_over=is_over), 0, aligns=False, size=1000)
        assert [text for _, text in lines] == expected


@given(TEXTS, st.data())
def test_reading_from_the_middle_begins_with_a_whole_line(texts: list[str], draw: st.DataObject) -> None:
    data = "".join(f"{text}\n" for text in texts).encode()
    begin = draw.draw(st.integers(0, len(data)))
    lines = read_all(data, part_of(data, is_over=True), begin, aligns=True, size=1000)
    whole = read_all(data, part_of(data, is_over=True), 0, aligns=False, size=1000)
    assert lines == [line for line in whole if data.find(b"\n", begin) >= 0 and line[0] > data.find(b"\n", begin)]


def test_line_that_is_longer_than_a_read_does_not_stop_the_reader() -> None:
    data = b"x" * 1000 + b"\nend\n"
    lines = read_all(data, part_of(data, is_over=True), 0, aligns=False, size=128)
    assert "".join(text for _, text in lines) == "x" * 1000 + "end" and lines[-1] == (1001, "end")
