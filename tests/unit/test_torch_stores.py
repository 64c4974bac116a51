"""Where a torch group meets, by ``init_method``."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

import raysgd
from raysgd.backends.torch_stores import Place, forget_store
from raysgd.errors import ConfigError

HERE = "127.0.0.1"


@pytest.mark.parametrize(
    "init_method", [None, "tcp://10.0.0.1:29500", "tcp://[::1]:29500", "file:///shared/meet", "env://"]
)
def test_what_torch_takes_is_taken(init_method: str | None) -> None:
    assert raysgd.TorchConfig(init_method=init_method).init_method == init_method


@pytest.mark.parametrize(
    "init_method", ["", "tcp://10.0.0.1", "tcp://:29500", "tcp://host:99999", "file://", "http://x:1"]
)
def test_what_is_no_place_is_refused_at_once(init_method: str) -> None:
    with pytest.raises(ConfigError, match=r"TorchConfig\(init_method="):
        raysgd.TorchConfig(init_method=init_method)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


def test_by_itself_it_is_a_free_port_of_the_node() -> None:
    place = Place.open(None, HERE)
    told = json.loads(place.told)
    assert told["host"] == HERE and told["port"] > 0
    place.close()
    place.close()


def test_a_port_that_was_given_is_listened_at_and_given_back() -> None:
    port = free_port()
    for _ in range(3):
        place = Place.open(f"tcp://{HERE}:{port}", "10.0.0.1")
        assert json.loads(place.told) == {"host": HERE, "port": port}
        with pytest.raises(ConfigError, match=f"cannot listen at {HERE}:{port}: .*use"):
            Place.open(f"tcp://{HERE}:{port}", "10.0.0.1")
        place.close()


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(ConfigError, match=r"rank 0, on .* cannot listen at 192\.0\.2\.77:29500"):
        Place.open("tcp://192.0.2.77:29500", HERE)


def test_the_environment_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(ConfigError, match="MASTER_ADDR must be set in the workers"):
        Place.open("env://", HERE)
    monkeypatch.setenv("MASTER_ADDR", HERE)
    place = Place.open("env://", "10.0.0.1")
    assert json.loads(place.told) == {"host": HERE, "port": port}
    place.close()


def test_each_group_has_a_file_of_its_own(tmp_path: Path) -> None:
    places = [Place.open(f"file://{tmp_path}/meet", HERE) for _ in range(2)]
    paths = [Path(json.loads(place.told)["path"]) for place in places]
    assert paths[0] != paths[1] and {path.parent for path in paths} == {tmp_path}
    paths[0].touch()
    for place in [*places, *places]:
        forget_store(place)
    assert not paths[0].exists()
