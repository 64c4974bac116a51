"""Write the pages and the pictures of the benchmarks from their results, without measuring anything.

    python benchmarks/report.py [FOLDER]

FOLDER holds results.json and others; doc/benchmarks by default.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench import results
from bench.pages import backends, comparison, gpu, ingest, recovery, scale, search
from bench.program import PUBLISHED, write_page
from scale import write_scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=PUBLISHED)
    folder = parser.parse_args().folder
    for page in (comparison.PAGE, recovery.PAGE, ingest.PAGE, search.PAGE, backends.PAGE):
        path = folder / f"{page.stem}.json"
        if path.exists():
            write_page(json.loads(path.read_text(encoding="utf-8")), folder, page)
            print(folder / page.file_name)
    path = folder / f"{scale.STEM}.json"
    if path.exists():
        print(write_scale(json.loads(path.read_text(encoding="utf-8")), folder))
    path = folder / f"{gpu.PAGE.stem}.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else results.new_document({})
    (folder / gpu.PAGE.file_name).write_text(gpu.PAGE.render(document), encoding="utf-8")  # also before the first run
    print(folder / gpu.PAGE.file_name)


if __name__ == "__main__":
    main()
