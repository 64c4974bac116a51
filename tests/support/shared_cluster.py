"""One Ray cluster for all test modules with the same settings: a start takes some five seconds."""

from __future__ import annotations

from typing import Any

import psutil
import ray

from support.cluster import start_ray

_DEFAULTS = {"num_cpus": 8, "include_dashboard": False, "log_to_driver": True, "namespace": "tests"}
#: Parts of the command lines of Ray's own processes.
_RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "/site-packages/ray/")


class SharedCluster:
    """The running cluster, if there is one."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] | None = None
        self._info: dict[str, Any] = {}

    @property
    def is_running(self) -> bool:
        return self._settings is not None and ray.is_initialized()

    def get(self, **settings: Any) -> dict[str, Any]:
        """Return the running cluster if it has these settings, else a new one."""
        wanted = _DEFAULTS | settings
        if not self.is_running or self._settings != wanted:
            self.stop()
            self._info = start_ray(**wanted)
            self._settings = wanted
        return self._info

    def stop(self) -> None:
        """Stop the cluster, so that the next module gets a new one."""
        if self._settings is not None:
            self._settings = None
            ray.shutdown()

    def renew(self) -> None:
        """Replace the cluster by a new one with the same settings."""
        settings = self._settings or {}
        self.stop()
        self.get(**settings)

    def owns(self, process: psutil.Process) -> bool:
        """Return whether a process lives as long as the cluster and holds nothing of a test."""
        try:
            return self.is_running and any(name in " ".join(process.cmdline()) for name in _RAYS_OWN)
        except psutil.Error:
            return False


CLUSTER = SharedCluster()
