"""Which checkpoints does a run have, and which of them can be trusted?

Owner: the supervisor. Trainer slots write into ``step_00000012.tmp``; ``commit`` adds the model's files and the
manifest, verifies all of it, and only then renames the folder. Every write is on disk before the next relies on it.

Invariants (tests/runtime/test_checkpoints.py): killed at any point, ``newest`` is still a whole checkpoint, of this
step or of the one before; nothing is removed before a newer one is committed; a failed save leaves the older ones as
they are.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from nereus.backends.manifest import (
    FORMAT,
    MANIFEST,
    MODEL_FOLDER,
    CheckpointManifest,
    ModelFile,
    SlotFile,
    file_checksum,
    read_manifest,
    seal,
    stored_tensors,
    verify,
)
from nereus.errors import CheckpointError
from nereus.transition.reshard import TensorSpec, listing

_COMMITTED = re.compile(r"step_(\d{8,})")
_TEMPORARY = ".tmp"
_REPLACED = ".replaced.tmp"
MODEL_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
"""A model folder's configuration and tokenizer files."""


class Search(Struct, frozen=True):
    """The newest checkpoint that is whole (None: there is none), and why newer ones are not."""

    folder: Path | None
    passed_over: tuple[str, ...] = ()


def _never(where: str) -> None:
    """Do nothing: no failpoint is set."""


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    ``failpoint`` is called with a name after every write, so that tests can stop there.
    """

    def __init__(self, root: Path, keep: int, *, failpoint: Callable[[str], None] = _never) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}")
        self._root = root
        self._keep = keep
        self._failpoint = failpoint

    def begin(self, step: int) -> Path:
        """Return a fresh temporary folder for the state after ``step``."""
        folder = self._temporary(step)
        self.abandon(step)
        folder.mkdir(parents=True)
        return folder

    def abandon(self, step: int) -> None:
        """Remove what was written for a checkpoint that is not committed; the others are not touched."""
        if self._temporary(step).exists():
            shutil.rmtree(self._temporary(step))

    def commit(
        self,
        step: int,
        entries: Sequence[bytes],
        extra: Mapping[str, Any],
        *,
        model: Path | None = None,
        tensors: Sequence[TensorSpec] = (),
    ) -> Path:
        """Make the checkpoint of ``step`` visible, given the trainer slots' manifest entries; then apply retention.

        ``model`` is the folder whose configuration and tokenizer files are kept (a model folder, or the checkpoint that
        the run started from); ``tensors`` are those that must all be there, whole. ``CheckpointError`` if anything is
        missing or the disk is full: the temporary folder is removed then, and the older checkpoints are as before.
        """
        folder = self._temporary(step)
        try:
            slots = tuple(sorted((_slot_file(entry) for entry in entries), key=lambda slot: slot.file))
            files = self._copy_model(model, folder) if model else ()
            raw = msgspec.Raw(msgspec.json.encode(extra))
            manifest = CheckpointManifest(FORMAT, step, slots, files, raw)
            verify(folder, manifest)
            _require_tensors(manifest, tensors)
            _write(folder / MANIFEST, seal(manifest), self._failpoint)
            _sync(folder)
            self._failpoint("folder synced")
            if read_manifest(folder) != manifest:
                raise CheckpointError(f"{folder / MANIFEST} does not read back as it was written")
            self._publish(folder, self._committed(step))
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self._root}: {error.strerror}; the older "
                "checkpoints are untouched"
            ) from error
        except CheckpointError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._retain(step)
        return self._committed(step)

    def newest(self) -> Search:
        """Return the newest checkpoint whose every byte fits its manifest, walking back over those that do not."""
        passed_over: list[str] = []
        for _, folder in reversed(self._all()):
            try:
                self.validate(folder)
            except CheckpointError as error:
                passed_over.append(str(error))
            else:
                return Search(folder, tuple(passed_over))
        return Search(None, tuple(passed_over))

    def clean(self) -> tuple[Path, ...]:
        """Remove what an earlier, killed run left half-done; return it. Call it before the first ``begin``."""
        found = sorted(self._root.glob(f"step_*{_TEMPORARY}")) if self._root.is_dir() else []
        for folder in found:
            original = self._root / folder.name.removesuffix(_REPLACED)
            if folder.name.endswith(_REPLACED) and not original.exists():
                folder.rename(original)
                _sync(self._root)
            else:
                shutil.rmtree(folder)
        return tuple(found)

    def validate(self, folder: Path, *, content: bool = True) -> CheckpointManifest:
        """Return the manifest of a committed checkpoint; ``CheckpointError`` names what does not fit.

        Without ``content`` only names, sizes and headers are checked.
        """
        manifest = read_manifest(folder)
        named = _COMMITTED.fullmatch(folder.name)
        if named and int(named[1]) != manifest.step:
            raise CheckpointError(f"{folder} holds a checkpoint of step {manifest.step}")
        verify(folder, manifest, content=content)
        return manifest

    def read(self, folder: Path) -> dict[str, Any]:
        """Return the ``extra`` that a whole checkpoint was committed with."""
        extra: dict[str, Any] = msgspec.json.decode(self.validate(folder).extra, type=dict[str, Any])
        return extra

    # Inside

    def _temporary(self, step: int) -> Path:
        return self._root / f"step_{step:08d}{_TEMPORARY}"

    def _committed(self, step: int) -> Path:
        return self._root / f"step_{step:08d}"

    def _all(self) -> list[tuple[int, Path]]:
        """Return the committed folders by step, oldest first; symbolic links are none."""
        entries = self._root.iterdir() if self._root.is_dir() else ()
        matches = ((_COMMITTED.fullmatch(entry.name), entry) for entry in entries)
        found = ((int(match[1]), entry) for match, entry in matches if match and not entry.is_symlink())
        return sorted(found)

    def _copy_model(self, model: Path, folder: Path) -> tuple[ModelFile, ...]:
        source = model / MODEL_FOLDER if (model / MANIFEST).is_file() else model
        target = folder / MODEL_FOLDER
        target.mkdir()
        files = []
        for path in sorted(source.iterdir()):
            if path.suffix not in MODEL_SUFFIXES or path.name.endswith(".safetensors.index.json"):
                continue
            content = path.read_bytes()
            _write(target / path.name, content, self._failpoint)
            files.append(ModelFile(path.name, len(content), file_checksum(target / path.name)))
        _sync(target)
        if not any(file.file == "config.json" for file in files):
            raise CheckpointError(f"{source} has no config.json: it is not a model folder")
        return tuple(files)

    def _publish(self, folder: Path, target: Path) -> None:
        """Rename ``folder`` to ``target``. An older checkpoint of the same step makes way, and comes back if we die."""
        replaced = target.with_name(target.name + _REPLACED)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
            self._failpoint("older one of the same step moved")
        folder.rename(target)
        self._failpoint("renamed")
        _sync(self._root)
        self._failpoint("committed")
        if replaced.exists():
            shutil.rmtree(replaced)

    def _retain(self, committed: int) -> None:
        """Remove the checkpoints older than the ``keep`` newest whole ones; never the one just committed."""
        whole = 0
        for step, folder in reversed(self._all()):
            if whole >= self._keep and step != committed:
                # Renamed first: a half-removed folder must not look like a checkpoint.
                doomed = folder.with_name(folder.name + _TEMPORARY)
                folder.rename(doomed)
                self._failpoint("doomed")
                shutil.rmtree(doomed)
                continue
            with contextlib.suppress(CheckpointError):
                self.validate(folder, content=False)
                whole += 1


def _require_tensors(manifest: CheckpointManifest, tensors: Sequence[TensorSpec]) -> None:
    for kind, stored in stored_tensors(manifest).items():
        shapes = {spec.name: spec.shape for spec in stored}
        wrong = [spec.name for spec in tensors if shapes.get(spec.name) != spec.shape]
        if wrong:
            raise CheckpointError(f"the checkpoint of step {manifest.step} lacks {kind} of {listing(wrong)}")


def _slot_file(entry: bytes) -> SlotFile:
    try:
        return msgspec.json.decode(entry, type=SlotFile)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"a trainer slot sent a manifest entry that is not readable: {error}") from error


def _write(path: Path, content: bytes, failpoint: Callable[[str], None]) -> None:
    with path.open("xb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        failpoint(f"half of {path.name}")
        file.write(content[len(content) // 2 :])
        file.flush()
        os.fsync(file.fileno())
    failpoint(path.name)


def _sync(folder: Path) -> None:
    """Bring the names in ``folder`` to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
