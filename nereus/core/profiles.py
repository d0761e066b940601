"""Which clusters and models are known by name?

Reads ``profiles/clusters/NAME.toml`` and ``profiles/models/NAME.toml``; the files state the source of every number. A
path to a TOML file, a ``config.json`` or a model folder works as well as a name. A name may be cut short as long as it
is the start of only one profile, have an owner in front (``meta-llama/Llama-3.1-8B``), and capitals where it likes.
Wrong names and files are ``ConfigError``: operators type them.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from nereus.core.cluster import Cluster, Device, Link, uniform_nodes
from nereus.core.shape import ModelShape
from nereus.core.units import GB, MICRO, TERA
from nereus.errors import ConfigError

PROFILES = next(
    (
        path
        for path in (Path(__file__).parents[1] / "profiles", Path(__file__).parents[2] / "profiles")
        if path.is_dir()
    ),
    Path("profiles"),
)
"""In the package, where an installation puts them (a link in a checkout), else beside it, where links are not kept."""

_Above0 = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=1)]

_FILES = {
    "clusters": "name a TOML file like those of profiles/clusters",
    "models": "name a Hugging Face model folder with a config.json, or that file",
}


class _Device(Struct, forbid_unknown_fields=True):
    name: str
    memory_gb: _Above0
    peak_tflops: _Above0
    bandwidth_gb_s: _Above0


class _Link(Struct, forbid_unknown_fields=True):
    latency_us: Annotated[float, Meta(ge=0)]
    bandwidth_gb_s: _Above0

    def link(self) -> Link:
        return Link(self.latency_us * MICRO, self.bandwidth_gb_s * GB)


class _Host(Struct, forbid_unknown_fields=True):
    bandwidth_gb_s: _Above0
    memory_gb: Annotated[float, Meta(ge=0)] = 0


class _ClusterFile(Struct, forbid_unknown_fields=True):
    slots: _Count
    slots_per_node: _Count
    device: _Device
    in_node: _Link
    cross_node: _Link
    host: _Host


def profile_names(kind: str) -> tuple[str, ...]:
    """Return the known names of ``clusters`` or ``models``."""
    return tuple(sorted(path.stem for path in (PROFILES / kind).glob("*.toml")))


def load_cluster(name: str, slots: int | None = None) -> Cluster:
    """Return the named cluster, with ``slots`` slots instead of its own number if given."""
    path = _find("clusters", name, where="cluster")
    try:
        stated = msgspec.convert(_toml(path, where="cluster"), _ClusterFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path.name} is no cluster profile: {error}", where="cluster", remedy="correct it") from None
    count = stated.slots if slots is None else slots
    if count < 1:
        raise ConfigError(f"{count} slots make no cluster", where="slots", remedy="ask for at least 1")
    return Cluster(
        path.stem,
        Device(
            stated.device.name,
            stated.device.memory_gb * GB,
            stated.device.peak_tflops * TERA,
            stated.device.bandwidth_gb_s * GB,
        ),
        uniform_nodes(count, stated.slots_per_node),
        stated.in_node.link(),
        stated.cross_node.link(),
        stated.host.bandwidth_gb_s * GB,
        stated.host.memory_gb * GB,
    )


def load_model(name: str) -> ModelShape:
    """Return the sizes of the named model, or of a model folder or ``config.json``."""
    path = _find("models", name, where="model")
    config = _json(path) if path.suffix == ".json" else _toml(path, where="model")
    try:
        return ModelShape.from_config(config)
    except ValueError as error:
        remedy = "name a dense decoder-only language model"
        raise ConfigError(f"{path.name}: {error}", where="model", remedy=remedy) from None


def _find(kind: str, name: str, *, where: str) -> Path:
    for path in (Path(name), Path(name) / "config.json"):
        if path.suffix in (".toml", ".json") and path.is_file():
            return path
    known = profile_names(kind)
    short = name.rpartition("/")[2].lower()
    starting = [stem for stem in known if stem.startswith(short)] if short else []
    if short in known or len(starting) == 1:
        return PROFILES / kind / f"{short if short in known else starting[0]}.toml"
    near = starting or difflib.get_close_matches(short, known, n=2, cutoff=0.4)
    remedy = f"did you mean {' or '.join(near)}? known: {', '.join(known)}" if near else f"known: {', '.join(known)}"
    if Path(name).exists():
        raise ConfigError(f"{name!r} holds no {where} profile", where=where, remedy=_FILES[kind])
    raise ConfigError(f"there is no {where} profile {name!r}", where=where, remedy=remedy)


def _toml(path: Path, *, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", where=where, remedy="correct the file") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", where="model", remedy="restore the file") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no JSON object", where="model", remedy="restore the file")
    return document
