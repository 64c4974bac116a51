"""Finds the files that this process prints to. Worker side; `raysgd logs` reads them."""

from __future__ import annotations

import contextlib
import os
import stat
import sys

from raysgd.session.events import OutputFile

_STDOUT, _STDERR = 1, 2


def find_output() -> tuple[OutputFile, ...]:
    """Return the files of stdout and stderr, and how much is in them; empty if they are not files, or not on Linux.

    Ray gives each worker process two files on its node. The descriptors are read, not `sys.stdout`, which a program may
    replace.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user's own stream, which may be closed
            stream.flush()
    found = []
    for descriptor in (_STDOUT, _STDERR):
        try:
            status, path = os.fstat(descriptor), os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return ()
        if not stat.S_ISREG(status.st_mode):
            return ()
        found.append(OutputFile(path, status.st_size))
    return tuple(found)
