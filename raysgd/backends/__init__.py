"""Backends form the process group of an attempt's workers and take it down again; nothing else.

`base` has the contract, `registry` resolves names to configs. Only `Backend.load`, in a worker, imports a framework.
"""

from raysgd.backends.base import Backend, BackendConfig, Coordinator, Member

__all__ = ["Backend", "BackendConfig", "Coordinator", "Member"]
