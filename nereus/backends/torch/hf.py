"""How do weights get out of a Hugging Face model folder, and into one?

By tensor name and index range: a slot reads only its pieces; a folder is written in shards and read back. Configuration
and tokenizer files are copied as they are.

Invariants (tests/backends/test_hf.py): every wanted tensor is found with the wanted shape, or ``CheckpointError`` lists
those that are not; a written folder holds exactly the tensors of its model, bit for bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nereus.backends.torch.checkpoint import dtype_name, tensor_checksum
from nereus.errors import CheckpointError, ConfigError
from nereus.transition.reshard import Piece, TensorSpec, listing, tensor_bytes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000

_FILE_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class ModelFolder:
    """The weight files of a model folder, opened. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """``ConfigError`` if there are no safetensors weights; pickled ones are never read."""
        self._folder = folder
        self._files = _weight_files(folder)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> ModelFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def names(self) -> frozenset[str]:
        """The names of all stored tensors."""
        return frozenset(self._files)

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of a stored tensor."""
        part = self._file(name).get_slice(name)
        dtype = part.get_dtype()
        if dtype not in _SAFETENSORS_DTYPES:
            raise CheckpointError(f"{self._folder / self._files[name]}: {name} is stored as {dtype}, not as floats")
        return TensorSpec(name, tuple(part.get_shape()), _SAFETENSORS_DTYPES[dtype])

    def read(self, piece: Piece, name: str | None = None) -> Tensor:
        """Return ``piece`` of a stored tensor (under another ``name`` if given)."""
        name = name or piece.name
        if not piece.start:
            tensor: Tensor = self._file(name).get_tensor(name)
            return tensor
        box = tuple(slice(low, high) for low, high in zip(piece.start, piece.stop, strict=True))
        part: Tensor = self._file(name).get_slice(name)[box]
        return part

    def _file(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            try:
                self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self._folder / file} cannot be read: {error}") from error
        return self._open[file]


def read_pieces(folder: Path, wanted: Sequence[tuple[TensorSpec, Piece]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the wanted pieces of a model folder in ``dtype``, by tensor name.

    Of tied tensors the folder may hold either name, or both if they are equal: the model has one tensor, so a second
    one that differs would be lost (``ConfigError``). ``CheckpointError`` lists what is missing or of another shape.
    """
    aliases = _aliases(folder)
    result: dict[str, Tensor] = {}
    with ModelFolder(folder) as stored:
        sources = {spec.name: _find(spec.name, aliases, stored.names) for spec, _ in wanted}
        problems = [f"{name} is missing" for name, source in sources.items() if source is None]
        for spec, _ in wanted:
            source = sources[spec.name]
            found = stored.spec(source).shape if source else spec.shape
            if found != spec.shape:
                problems.append(f"{spec.name} has shape {found}, the model needs {spec.shape}")
        if problems:
            raise CheckpointError(f"{folder} does not fit its config.json: {listing(problems)}")
        for spec, piece in wanted:
            source = sources[spec.name]
            assert source
            result[spec.name] = stored.read(piece, source).to(dtype)
            for alias, name in aliases.items():
                if name == spec.name == source and alias in stored.names:
                    _check_tie(folder, stored, spec, piece, alias)
    return result


def is_tied(folder: Path) -> bool:
    """Return whether config.json says that the output head is the embedding."""
    config = json.loads((folder / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", False))


def write_folder(
    out: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    source: Path,
    *,
    changes: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model folder: the ``tensors`` that ``specs`` announce, and the files of the model folder ``source``.

    ``changes`` are made to config.json. Tensors come one at a time, in the order of ``specs``. The folder appears under
    its name only after it was read back and every name, shape, dtype and checksum fits; ``CheckpointError`` otherwise.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError("is not empty", where=str(out), remedy="choose a new folder for the model")
    partial = out.with_name(f".{out.name}.tmp")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    copy_files(source, partial, changes or {})
    checksums = _write_shards(partial, specs, tensors, shard_bytes)
    _read_back(partial, specs, checksums)
    if out.exists():
        out.rmdir()
    partial.rename(out)


def copy_files(source: Path, out: Path, changes: Mapping[str, Any]) -> None:
    """Copy configuration, generation settings, tokenizer and chat template; all but the weights."""
    for path in sorted(source.iterdir()):
        if path.suffix in _FILE_SUFFIXES and not path.name.endswith(".index.json") and path.is_file():
            shutil.copyfile(path, out / path.name)
    config = out / "config.json"
    if not config.is_file():
        raise ConfigError("has no config.json", where=str(source), remedy="name a Hugging Face model folder")
    if changes:
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}, indent=2) + "\n")


# Reading


def _weight_files(folder: Path) -> dict[str, str]:
    """Return tensor name -> file name."""
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}") from error
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{index} names files outside its folder: {listing(outside)}")
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(f"{folder} lacks weight files that {INDEX} names: {listing(absent)}")
        return dict(weight_map)
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"has neither {WEIGHTS} nor {INDEX}",
            where=str(folder),
            remedy="use safetensors weights; pickled ones are never read, GGUF files are imported first",
        )
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read: {error}") from error


def _aliases(folder: Path) -> dict[str, str]:
    return {"lm_head.weight": "model.embed_tokens.weight"} if is_tied(folder) else {}


def _find(name: str, aliases: Mapping[str, str], stored: frozenset[str]) -> str | None:
    """Return under which name a tensor is stored: its own, or one that is tied to it."""
    if name in stored:
        return name
    other = [alias for alias, target in aliases.items() if target == name] + [aliases.get(name, "")]
    return next((candidate for candidate in other if candidate in stored), None)


def _check_tie(folder: Path, stored: ModelFolder, spec: TensorSpec, piece: Piece, alias: str) -> None:
    if stored.spec(alias).shape == spec.shape and torch.equal(stored.read(piece), stored.read(piece, alias)):
        return
    raise ConfigError(
        f"tie_word_embeddings is true, but the stored {alias} differs from {spec.name}",
        where=str(folder / "config.json"),
        remedy=f"set tie_word_embeddings to false to train both, or remove {alias} from the weights",
    )


# Writing


def _write_shards(
    out: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> dict[str, str]:
    shards = list(_shards(specs, shard_bytes))
    arriving = iter(tensors)
    checksums: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {spec.name: _next(arriving, spec) for spec in shard}
        checksums |= {name: tensor_checksum(tensor) for name, tensor in content.items()}
        weight_map |= dict.fromkeys(content, file)
        try:
            save_file(content, out / file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{out / file} cannot be written: {error}") from error
    surplus = [name for name, _ in arriving]
    if surplus:
        raise ValueError(f"tensors that were not announced: {listing(surplus)}")
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(tensor_bytes, specs))}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return checksums


def _shards(specs: Sequence[TensorSpec], shard_bytes: int) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if shard and size + tensor_bytes(spec) > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(spec)
        size += tensor_bytes(spec)
    yield shard


def _next(arriving: Iterator[tuple[str, Tensor]], spec: TensorSpec) -> Tensor:
    name, tensor = next(arriving, ("nothing", torch.empty(0)))
    if (name, tuple(tensor.shape), dtype_name(tensor.dtype)) != (spec.name, spec.shape, spec.dtype):
        raise ValueError(f"announced was {spec}, what came is {name} {tuple(tensor.shape)} {tensor.dtype}")
    return tensor.contiguous()


def _read_back(folder: Path, specs: Sequence[TensorSpec], checksums: Mapping[str, str]) -> None:
    with ModelFolder(folder) as stored:
        if stored.names != checksums.keys():
            raise CheckpointError(f"{folder} does not hold what was written: {sorted(stored.names ^ checksums.keys())}")
        for spec in specs:
            found = stored.spec(spec.name)
            if (found.shape, found.dtype) != (spec.shape, spec.dtype):
                raise CheckpointError(f"{folder}: {spec.name} reads back as {found.dtype} {found.shape}")
            tensor = stored.read(Piece(spec.name, (0,) * len(spec.shape), spec.shape))
            if tensor.nbytes != tensor_bytes(spec) or tensor_checksum(tensor.contiguous()) != checksums[spec.name]:
                raise CheckpointError(f"{folder}: {spec.name} reads back with another checksum")
