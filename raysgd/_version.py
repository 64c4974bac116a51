"""The version, in the one place it is kept; setup.py reads it as text."""

__version__ = "0.1.0.dev0"
