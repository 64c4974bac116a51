"""Lets a model that ``torch.compile(model)`` has wrapped load a checkpoint, in which the names have no ``_orig_mod.``.

Checkpoints hold the names of the model inside, so that it loads them whether it is compiled or not. Runs wherever checkpoints are
loaded; imports nothing of torch.
"""

from __future__ import annotations

import sys
from typing import Any

_PREFIX = "_orig_mod."


def accept_plain_names() -> None:
    """Make compiled models of this process take states with and without the prefix, if the compiler is imported."""
    kind: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if kind is None or "_load_from_state_dict" in vars(kind):
        return
    original = kind._load_from_state_dict

    def load(self: Any, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        own = prefix + _PREFIX
        names = [name for name in state_dict if name.startswith(prefix)]
        if not any(name.startswith(own) for name in names):
            for name in names:
                state_dict[own + name[len(prefix) :]] = state_dict.pop(name)
        original(self, state_dict, prefix, *args, **kwargs)

    kind._load_from_state_dict = load
