"""Runs the command as ``python -m raysgd.cli``."""

import sys

from raysgd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
