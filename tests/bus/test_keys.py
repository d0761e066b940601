"""Keys are made once, readable by their owner alone, and refused when they are not what they should be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from nereus.bus.keys import ALLOWED, ensure_keys, load_allowed, load_keys, make_pair
from nereus.errors import ConfigError

NAMES = ["supervisor", "rollout-0"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_made_once_with_closed_modes(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "keys"
    old = os.umask(0)
    try:
        first = ensure_keys(folder, NAMES)
    finally:
        os.umask(old)
    assert mode(folder) == 0o700
    assert {path.name: mode(path) for path in folder.glob("*.key")} == {f"{name}.key": 0o600 for name in NAMES}
    assert ensure_keys(folder, NAMES) == first
    assert sorted(os.listdir(folder)) == [ALLOWED, "rollout-0.key", "supervisor.key"]


def test_the_allow_list_holds_public_halves_only_and_grows(tmp_path: Path) -> None:
    pairs = ensure_keys(tmp_path / "keys", NAMES)
    more = ensure_keys(tmp_path / "keys", ["rollout-1"])
    text = (tmp_path / "keys" / ALLOWED).read_text()
    assert load_allowed(tmp_path / "keys") == {name: pair.public for name, pair in (pairs | more).items()}
    assert not any(pair.secret in text for pair in pairs.values())


def test_a_process_loads_its_own_pair(tmp_path: Path) -> None:
    pairs = ensure_keys(tmp_path / "keys", NAMES)
    keys = load_keys(tmp_path / "keys", "rollout-0")
    assert keys.pair == pairs["rollout-0"]
    assert set(keys.allowed) == set(NAMES)


def test_a_secret_does_not_show_in_its_repr() -> None:
    pair = make_pair("rollout-0")
    assert pair.secret not in repr(pair)


@pytest.mark.parametrize("wide", [0o640, 0o604, 0o644])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, wide: int) -> None:
    folder = tmp_path / "keys"
    ensure_keys(folder, NAMES)
    path = folder / "rollout-0.key"
    path.chmod(wide)
    for act in (lambda: load_keys(folder, "rollout-0"), lambda: ensure_keys(folder, NAMES)):
        with pytest.raises(ConfigError, match="others can read this secret") as error:
            act()
        assert error.value.where == str(path)
        assert f"chmod 600 {path}" in error.value.remedy


def test_an_open_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    ensure_keys(folder, NAMES)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        load_keys(folder, "rollout-0")


@pytest.mark.parametrize(
    "damage",
    [b"", b"garbage", b"{}", b"\xff\xfe", b'{"name": "rollout-0", "public": "x", "secret": "y"}', b"[" * 100_000],
    ids=range(6),
)
def test_a_malformed_key_file_is_refused(tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path / "keys"
    ensure_keys(folder, NAMES)
    (folder / "rollout-0.key").write_bytes(damage)
    with pytest.raises(ConfigError, match="malformed"):
        load_keys(folder, "rollout-0")


def test_halves_that_do_not_belong_together_and_foreign_keys_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    pairs = ensure_keys(folder, NAMES)
    mixed = msgspec.structs.replace(pairs["rollout-0"], public=pairs["supervisor"].public)
    (folder / "rollout-0.key").write_bytes(msgspec.json.encode(mixed))
    with pytest.raises(ConfigError, match="do not belong together"):
        load_keys(folder, "rollout-0")
    (folder / "rollout-0.key").write_bytes(msgspec.json.encode(pairs["supervisor"]))
    with pytest.raises(ConfigError, match="holds the key of 'supervisor'"):
        load_keys(folder, "rollout-0")


@pytest.mark.parametrize("text", ["", "[]", '{"rollout-0": "short"}', '{"../x": "' + "a" * 40 + '"}'])
def test_a_malformed_allow_list_is_refused(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "keys"
    ensure_keys(folder, NAMES)
    (folder / ALLOWED).write_text(text)
    with pytest.raises(ConfigError, match="malformed"):
        load_keys(folder, "rollout-0")


def test_missing_files_are_named(tmp_path: Path) -> None:
    ensure_keys(tmp_path / "keys", NAMES)
    with pytest.raises(ConfigError, match="there is no key for rollout-7"):
        load_keys(tmp_path / "keys", "rollout-7")
    (tmp_path / "keys" / ALLOWED).unlink()
    with pytest.raises(ConfigError, match="allow-list is missing"):
        load_keys(tmp_path / "keys", "rollout-0")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 129, "a\n"])
def test_a_name_that_is_not_a_worker_id_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a worker id"):
        ensure_keys(tmp_path / "keys", [name])
