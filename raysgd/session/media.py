"""Images and histograms for `raysgd.report`. Worker side.

An image becomes a file of the run's folder, named after its content, and the report has a text that refers to it. A histogram
is a text itself. So what passes through the controller stays small, and each reader of reports takes it.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from raysgd._util.media import histogram_text, image_text
from raysgd.errors import MetricError, RaySGDError

if TYPE_CHECKING:
    import numpy as np

    from raysgd.checkpoint.storage.storage import Storage

#: The largest number of pixels, and of bins.
MAX_PIXELS = 1 << 22
MAX_BINS = 1000
#: Bytes of images that a rank keeps in one attempt.
MAX_BYTES = 1 << 30
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # of PNG, by the number of channels
_CHANNELS_LAST = "give pixels of shape (height, width), or (height, width, channels) with 1, 3 or 4 channels"


@final
class Image:
    """An image for a report: ``raysgd.report(sample=raysgd.Image(pixels))``. ``raysgd ui`` shows it by iteration.

    The pixels are copied. The file is written in another thread, to ``media/`` in the run's folder.

    Args:
        pixels: An array of shape (height, width) or (height, width, channels) with 1 (grey), 3 (RGB) or 4 (RGBA) channels, or a
            PIL image. Integers are 0 to 255, and floats 0 to 1; values beyond are cut. A tensor on a GPU is waited for.

    Raises:
        MetricError: It has another shape, more than 4 million pixels, or no numbers.
    """

    def __init__(self, pixels: Any) -> None:
        import numpy as np

        values = _as_array(pixels, "Image")
        if values.ndim == 2:
            values = values[:, :, None]
        if values.ndim != 3 or values.shape[2] not in _COLOUR_TYPES or not values.size:
            channels_first = values.ndim == 3 and values.shape[0] in _COLOUR_TYPES
            advice = (
                "move the channels to the end, such as by pixels.permute(1, 2, 0)" if channels_first else _CHANNELS_LAST
            )
            raise MetricError(f"raysgd.Image got the shape {np.shape(pixels)}; {advice}.", key="Image")
        if values.shape[0] * values.shape[1] > MAX_PIXELS:
            raise MetricError(
                f"raysgd.Image got {values.shape[0]} x {values.shape[1]} pixels; the limit is 4 million: make it smaller.",
                key="Image",
            )
        if values.dtype.kind in "fb":
            values = np.clip(np.nan_to_num(values.astype(np.float32)), 0, 1) * 255 + 0.5
        self._pixels: np.ndarray[Any, Any] = np.clip(values, 0, 255).astype(np.uint8)
        digest = hashlib.sha256(repr(self._pixels.shape).encode() + self._pixels.tobytes()).hexdigest()
        self.name = f"{digest[:32]}.png"

    @property
    def text(self) -> str:
        """The text that a report has in place of the image."""
        return image_text(self.name)

    def to_png(self) -> bytes:
        """Return the image as PNG."""
        height, width, channels = self._pixels.shape
        rows = b"".join(b"\0" + row.tobytes() for row in self._pixels)  # 0: no filter
        header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )


@final
class Histogram:
    """A histogram for a report: ``raysgd.report(weights=raysgd.Histogram(values))``. ``raysgd ui`` shows it by iteration.

    Args:
        values: An array of numbers, of any shape. Those that are not finite are left out. A tensor on a GPU is waited for.
        bins: The number of bins, which have one width.

    Raises:
        MetricError: The values are not real numbers, or there are too many bins.
    """

    def __init__(self, values: Any, bins: int = 64) -> None:
        import numpy as np

        if not 1 <= bins <= MAX_BINS:
            raise MetricError(f"raysgd.Histogram(bins={bins}) is not allowed: give 1 to {MAX_BINS}.", key="Histogram")
        found = _as_array(values, "Histogram").ravel()
        found = found[np.isfinite(found)].astype(np.float64)
        low, high = (float(found.min()), float(found.max())) if found.size else (0.0, 1.0)
        if low == high:
            half_width = max(0.5, abs(low) * 1e-6)
            low, high = low - half_width, high + half_width
        places = (found / 2 - low / 2) / (high / 2 - low / 2)  # halves: the range may be wider than the largest float
        counts = np.bincount(np.minimum((places * bins).astype(np.int64), bins - 1), minlength=bins)
        self.text = histogram_text(low, high, counts.tolist())


class ImageFolder:
    """Writes the images of reports to the run's folder. Used by the stream's thread; a write that fails does not end training.

    Args:
        folder: The folder for them, with few retries: the thread has reports to send.
        warn: Receives a text, once.
    """

    def __init__(self, folder: Storage, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._names: set[str] = set()
        self._num_bytes = 0
        self._has_warned = False

    def keep(self, image: Image) -> None:
        """Write an image, unless it was written before or there is no more room."""
        if image.name in self._names:
            return
        data = image.to_png()
        if self._num_bytes + len(data) > MAX_BYTES:
            self._warn_once(f"this rank has reported {MAX_BYTES >> 20} MiB of images; further ones are not kept.")
            return
        try:
            self._folder.write_bytes(image.name, data)
        except (RaySGDError, OSError) as error:
            self._warn_once(f"images of reports could not be written: {error}")
            return
        self._names.add(image.name)
        self._num_bytes += len(data)

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(text)


def _as_array(values: Any, name: str) -> np.ndarray[Any, Any]:
    import numpy as np

    if hasattr(values, "detach"):  # a tensor of torch, which may be on a GPU, and of a type that NumPy does not have
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    try:
        array = np.asarray(values)
    except Exception as error:
        raise MetricError(
            f"raysgd.{name} got {type(values).__name__}, which is not an array: {error}", key=name
        ) from error
    if array.dtype.kind not in "biuf":
        array = array.astype(np.float32) if array.dtype.name.startswith("bfloat") else array
    if array.dtype.kind not in "biuf":
        raise MetricError(f"raysgd.{name} got values of type {array.dtype}; give real numbers.", key=name)
    return array
