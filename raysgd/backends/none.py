"""No group at all: workers that share a Trainer and nothing else (evaluation, simulation, a framework of the user's)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysgd.backends.base import Backend, BackendConfig, Member


@dataclass(frozen=True, kw_only=True)
class NoneConfig(BackendConfig):
    """Workers without a process group."""

    name: ClassVar[str] = "none"

    def make(self) -> Backend:
        return NoneBackend()


class NoneBackend(Backend):
    """Does nothing."""

    waits_for_members: ClassVar[bool] = False

    def load(self) -> None:
        return None

    def set_up(self, member: Member) -> None:
        return None

    def tear_down(self) -> None:
        return None
