"""The ``"none"`` backend: workers without a process group, for evaluation, simulation or a framework of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysgd.backends.base import Backend, BackendConfig, Member
from raysgd.config.argument_names import refuse_unknown_fields


@refuse_unknown_fields()
@dataclass(frozen=True, kw_only=True)
class NoneConfig(BackendConfig):
    """Chooses the ``"none"`` backend, which has no settings."""

    name: ClassVar[str] = "none"

    def make_backend(self) -> Backend:
        return NoneBackend()


class NoneBackend(Backend):
    """A worker half that creates no process group."""

    waits_for_members: ClassVar[bool] = False

    def load(self) -> None:
        return None

    def init_process_group(self, member: Member) -> None:
        return None

    def destroy_process_group(self) -> None:
        return None
