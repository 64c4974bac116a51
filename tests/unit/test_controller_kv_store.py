"""Entries of the key-value store that another version of raysgd wrote."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from raysgd.backends.none import NoneConfig
from raysgd.config import ScalingConfig
from raysgd.controller import kv_store
from raysgd.controller.kv_store import SENT, Holder, get_run_dir, get_settings, list_holders, put_holder, put_settings
from raysgd.controller.requests import TrainerSettings, TrainerSpec
from raysgd.errors import ConfigError
from raysgd.trainer import channel
from raysgd.workers.versions import own_versions


class Store:
    """The functions of Ray's key-value store that raysgd uses, over a dict."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def _internal_kv_put(self, key: str, value: bytes, overwrite: bool = True, *, namespace: str) -> bool:
        """Return whether the key was there."""
        has_key = key in self.entries
        if overwrite or not has_key:
            self.entries[key] = value
        return has_key

    def _internal_kv_get(self, key: str, *, namespace: str) -> bytes | None:
        return self.entries.get(key)

    def _internal_kv_list(self, prefix: str, *, namespace: str) -> list[bytes]:
        return [key.encode() for key in self.entries if key.startswith(prefix)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(kv_store, "internal_kv", store)
    return store


def settings(**versions: str) -> TrainerSettings:
    spec = TrainerSpec(scaling=ScalingConfig(num_workers=1), backend=NoneConfig())
    return TrainerSettings("t", spec, {**own_versions(*SENT), **versions})


def test_settings_are_read_as_they_were_stored(store: Store) -> None:
    put_settings(settings())
    assert get_settings("t").spec.scaling == ScalingConfig(num_workers=1)


@pytest.mark.parametrize("differs", [{"wire": "bbbb", "raysgd": "9.9"}, {"python": "2.7.18"}])
def test_settings_of_another_version_are_refused_unread(store: Store, differs: dict[str, str]) -> None:
    put_settings(settings(**differs))
    stored: Any = pickle.loads(store.entries["settings/t"])
    store.entries["settings/t"] = pickle.dumps((*stored[:3], b"another format"))
    with pytest.raises(
        ConfigError, match=f"of this program on .* cannot work with .* {differs.get('raysgd', '2.7.18')} of the"
    ):
        get_settings("t")


def test_holders_with_other_fields_are_listed(store: Store) -> None:
    holder = Holder("t", None, "01", "train.py")
    put_holder(holder)
    stored: Any = pickle.loads(store.entries["holder/t"])
    store.entries["holder/t"] = pickle.dumps({**stored, "added_later": 1})
    assert list_holders() == [holder]


def test_folder_of_a_run_is_known_without_reading_its_request(store: Store) -> None:
    assert get_run_dir("t") is None
    store.entries["run/t"] = pickle.dumps(("/runs/a/run_001", b"another format"))
    assert get_run_dir("t") == "/runs/a/run_001"


def test_trainer_of_another_version_is_neither_attached_to_nor_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.get_actor", lambda name, namespace: object())
    put_settings(settings(wire="bbbb", raysgd="9.9"))
    kv_store.claim_alias("digits", "t")
    with pytest.raises(ConfigError, match=r"cannot work with raysgd 9\.9 of the driver"):
        channel.Channel.attach("digits")
    with pytest.raises(
        ConfigError, match="a detached Trainer 'digits' is in this cluster already, and its run is not known"
    ):
        channel._claim("digits", "another")
