"""Helpers for torch code, in the worker: from a single-device script to a distributed one in two lines.

::

    model = raysgd.torch.prepare_model(model)
    loader = raysgd.torch.prepare_data_loader(loader)

All of them also work outside a worker, as a world of one. The process group is not made here but by the torch backend.
"""

from raysgd.torch.devices import device
from raysgd.torch.exporting import export
from raysgd.torch.loader import PreparedLoader, prepare_data_loader
from raysgd.torch.logical import checksums, logical_steps
from raysgd.torch.meshes import mesh
from raysgd.torch.model import prepare_model, prepare_optimizer, unwrap
from raysgd.torch.restoring import restore

__all__ = [
    "PreparedLoader",
    "checksums",
    "device",
    "export",
    "logical_steps",
    "mesh",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "restore",
    "unwrap",
]
