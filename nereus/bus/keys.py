"""Who may speak under which name? The CURVE key pairs of a run.

Owner: whoever starts a run calls ``ensure_keys`` once; every process then loads its own pair with ``load_keys``. One
pair per worker id, in ``NAME.key`` (JSON, mode 0600, in a folder of mode 0700); the public halves of all are in
``allowed.json``.

Invariant (tests/bus/test_keys.py): a secret that others can read, or a file that is not what it should be, is refused
with the remedy, never repaired silently.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import zmq
from msgspec import Struct
from zmq.utils import z85

from nereus.errors import ConfigError

ALLOWED = "allowed.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_KEY_FILE_BYTES = 4096
_MAKE_KEYS = "start the run anew: it makes the keys it lacks"


class KeyPair(Struct, frozen=True, forbid_unknown_fields=True):
    """The two halves of one worker's key, in Z85 text."""

    name: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.name}, {self.public})"


class Keys(Struct, frozen=True):
    """What one process needs: its own pair, and the public keys of all."""

    pair: KeyPair
    allowed: dict[str, str]
    """Worker id -> public key."""


def make_pair(name: str) -> KeyPair:
    """Make a new pair in memory."""
    _check_name(name)
    public, secret = zmq.curve_keypair()
    return KeyPair(name, public.decode(), secret.decode())


def ensure_keys(folder: Path, names: Iterable[str]) -> dict[str, KeyPair]:
    """Return the pairs of ``names``, making those that ``folder`` does not hold; update the allow-list.

    Names that the allow-list holds already stay in it. ``ConfigError`` if the folder or a secret is open to others.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_if_open(folder, "700")
    pairs = {}
    for name in names:
        _check_name(name)
        path = _secret_path(folder, name)
        pairs[name] = _load_pair(path, name) if path.exists() else _write_pair(path, make_pair(name))
    allowed = load_allowed(folder) if (folder / ALLOWED).exists() else {}
    wanted = allowed | {name: pair.public for name, pair in pairs.items()}
    if wanted != allowed:
        _write_new(folder / ALLOWED, msgspec.json.format(msgspec.json.encode(dict(sorted(wanted.items())))), 0o644)
    return pairs


def load_keys(folder: Path, name: str) -> Keys:
    """Load the pair of ``name`` and the allow-list; ``ConfigError`` says what is wrong with which file."""
    _check_name(name)
    path = _secret_path(folder, name)
    if not path.exists():
        raise ConfigError(f"there is no key for {name}", where=str(path), remedy=_MAKE_KEYS)
    return Keys(_load_pair(path, name), load_allowed(folder))


def load_allowed(folder: Path) -> dict[str, str]:
    """Read the allow-list: worker id -> public key."""
    path = folder / ALLOWED
    try:
        allowed = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        for name, public in allowed.items():
            if not _NAME.fullmatch(name) or not _is_key(public):
                raise ValueError(f"entry {name!r} is not a worker id with a 40-character key")
    except FileNotFoundError:
        raise ConfigError("the allow-list is missing", where=str(path), remedy=_MAKE_KEYS) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise _malformed(path, str(error)) from None
    if len(set(allowed.values())) != len(allowed):
        raise _malformed(path, "two worker ids share a key")
    return allowed


def public_to_name(allowed: Mapping[str, str]) -> dict[bytes, str]:
    """Turn an allow-list around; ``ValueError`` if two names share a key."""
    names = {public.encode(): name for name, public in allowed.items()}
    if len(names) != len(allowed):
        raise ValueError("two worker ids share a key")
    return names


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a worker id; use letters, digits, dot, dash and underscore (at most 128)")


def _secret_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.key"


def _load_pair(path: Path, name: str) -> KeyPair:
    _refuse_if_open(path.parent, "700")
    _refuse_if_open(path, "600")
    try:
        data = path.read_bytes()[:_MAX_KEY_FILE_BYTES]
        pair = msgspec.json.decode(data, type=KeyPair)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _malformed(path, "not a key file") from None
    if pair.name != name:
        raise _malformed(path, f"it holds the key of {pair.name!r}")
    if not _is_key(pair.secret) or not _is_key(pair.public):
        raise _malformed(path, "a key is not 40 characters of Z85")
    if zmq.curve_public(pair.secret.encode()).decode() != pair.public:
        raise _malformed(path, "its halves do not belong together")
    return pair


def _write_pair(path: Path, pair: KeyPair) -> KeyPair:
    _write_new(path, msgspec.json.encode(pair), 0o600)
    return pair


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file under another name, then rename it: nobody ever sees half of it, or a secret with a wider mode."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(handle)
    temporary.replace(path)


def _refuse_if_open(path: Path, mode: str) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"belongs to user {status.st_uid}, not to you", where=str(path), remedy="use a folder of your own"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"others can read this secret (mode {stat.S_IMODE(status.st_mode):04o})",
            where=str(path),
            remedy=f"make new keys if others use this machine, then run: chmod {mode} {path}",
        )


def _is_key(text: str) -> bool:
    if len(text) != 40 or not text.isascii():
        return False
    try:
        return len(z85.decode(text.encode())) == 32
    except (KeyError, ValueError, struct.error):
        return False


def _malformed(path: Path, why: str) -> ConfigError:
    return ConfigError(f"malformed: {why}", where=str(path), remedy="remove the file; the next start makes a new one")
