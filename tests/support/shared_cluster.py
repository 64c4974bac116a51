"""One Ray cluster for all test modules that want the same: a start takes Ray some five seconds."""

from __future__ import annotations

from typing import Any

import psutil
import ray

from support.cluster import start_ray

_DEFAULTS = {"num_cpus": 8, "include_dashboard": False, "log_to_driver": True, "namespace": "tests"}
#: How the processes that Ray has for itself are called.
_RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "/site-packages/ray/")


class SharedCluster:
    """The cluster that is up, if one is."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] | None = None
        self._info: dict[str, Any] = {}

    @property
    def is_up(self) -> bool:
        return self._settings is not None and ray.is_initialized()

    def get(self, **settings: Any) -> dict[str, Any]:
        """One with these settings: that of the module before, or a new one."""
        wanted = _DEFAULTS | settings
        if not self.is_up or self._settings != wanted:
            self.stop()
            self._info = start_ray(**wanted)
            self._settings = wanted
        return self._info

    def stop(self) -> None:
        """The next module gets another one."""
        if self._settings is not None:
            self._settings = None
            ray.shutdown()

    def renew(self) -> None:
        """Another one in its place."""
        settings = self._settings or {}
        self.stop()
        self.get(**settings)

    def owns(self, process: psutil.Process) -> bool:
        """Whether it is one of those that are there as long as the cluster, with nothing of a test in it."""
        try:
            return self.is_up and any(name in " ".join(process.cmdline()) for name in _RAYS_OWN)
        except psutil.Error:
            return False


CLUSTER = SharedCluster()
