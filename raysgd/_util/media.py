"""How a report refers to an image, and holds a histogram: as texts, which every logger and reader takes. Pure."""

from __future__ import annotations

import re

#: The folder of the images in a run's folder.
FOLDER = "media"
_IMAGE = re.compile(rf"image:{FOLDER}/([0-9a-f]{{32}}\.png)")
_IMAGES = re.compile(rf'{_IMAGE.pattern}|\["{_IMAGE.pattern}"(?:, ?"{_IMAGE.pattern}")*\]')
_HISTOGRAM = re.compile(r"histogram:([^:,]+),([^:,]+):([0-9]+(?:,[0-9]+)*)")


def image_text(name: str) -> str:
    """Return the text that refers to an image by the name of its file."""
    return f"image:{FOLDER}/{name}"


def image_names(text: str) -> list[str]:
    """Return the names of the files that a text refers to, or JSON of a list of such texts; none if it is another text."""
    match = _IMAGES.fullmatch(text)
    return _IMAGE.findall(text) if match else []


def histogram_text(low: float, high: float, counts: list[int]) -> str:
    """Return a histogram with bins of one width from ``low`` to ``high`` as text."""
    return f"histogram:{low!r},{high!r}:{','.join(map(str, counts))}"


def parse_histogram(text: str) -> tuple[float, float, list[int]] | None:
    """Return the range and the counts of a histogram's text; None if the text is another one."""
    match = _HISTOGRAM.fullmatch(text)
    try:
        return match and (float(match[1]), float(match[2]), [int(count) for count in match[3].split(",")])
    except ValueError:
        return None
