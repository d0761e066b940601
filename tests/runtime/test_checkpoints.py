"""Is there always a whole checkpoint, whatever dies, fills up or rots?"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from nereus.backends.manifest import MANIFEST, CheckpointManifest, SlotFile, StoredPiece, seal
from nereus.errors import CheckpointError
from nereus.runtime.checkpoints import CheckpointStore
from nereus.transition.reshard import Piece, TensorSpec

KINDS = ("parameter", "exp_avg", "exp_avg_sq")
SPECS = (TensorSpec("embed", (7, 4), "float32"), TensorSpec("norm", (4,), "float32"))
SHARES = {"0-0": [Piece("embed", (0, 0), (4, 4))], "0-1": [Piece("embed", (4, 0), (7, 4)), Piece("norm", (0,), (4,))]}


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the program handles it."""


def write_slot(folder: Path, name: str, step: int) -> bytes:
    """Write a slot's file in the safetensors format, without torch."""
    data, header, stored = b"", {}, []
    for kind in KINDS:
        for piece in SHARES[name]:
            shape = [high - low for low, high in zip(piece.start, piece.stop, strict=True)]
            content = np.random.default_rng(step).normal(size=shape).astype(np.float32).tobytes()
            checksum = xxhash.xxh3_64_hexdigest(content)
            entry = StoredPiece(kind, piece.name, piece.start, piece.stop, "float32", checksum)
            header[entry.key] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
            data += content
            stored.append(entry)
    head = json.dumps(header).encode()
    path = folder / f"slot-{name}.safetensors"
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return msgspec.json.encode(SlotFile(path.name, path.stat().st_size, step, {"step": step}, tuple(stored)))


def save(store: CheckpointStore, step: int, model: Path | None = None) -> Path:
    folder = store.begin(step)
    entries = [write_slot(folder, name, step) for name in SHARES]
    return store.commit(step, entries, {"step": step, "cursor": [1, 2]}, model=model, tensors=SPECS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
    ):
        (folder / name).write_text(f"content of {name}")
    return folder


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_a_checkpoint_is_whole_and_self_sufficient(tmp_path: Path, model: Path) -> None:
    store = CheckpointStore(tmp_path / "ck", 2)
    folder = save(store, 12, model)
    assert folder.name == "step_00000012"
    assert store.newest().folder == folder
    assert store.read(folder) == {"step": 12, "cursor": [1, 2]}
    assert names(folder / "model") == ["chat_template.jinja", "config.json", "tokenizer.json"]
    again = save(store, 13, folder)
    assert names(again / "model") == names(folder / "model"), "a checkpoint serves as the model of the next"


def test_retention_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in range(1, 5):
        save(store, step)
    assert names(tmp_path) == ["step_00000003", "step_00000004"]
    (tmp_path / "step_00000004" / MANIFEST).unlink()
    save(store, 5)
    assert names(tmp_path) == ["step_00000003", "step_00000004", "step_00000005"], "a broken one does not count"


def test_resuming_from_before_keeps_what_was_just_committed(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, 2), 9)
    store = CheckpointStore(tmp_path, 1)
    assert save(store, 3).exists()


FAILPOINTS = [
    "half of config.json",
    "config.json",
    "half of tokenizer.json",
    "half of manifest.json",
    "manifest.json",
    "folder synced",
    "renamed",
    "committed",
    "doomed",
]


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_killed_at_any_write_the_newest_is_whole(tmp_path: Path, model: Path, failpoint: str) -> None:
    """S08, S10, S11: keep=1, so a wrong order would lose everything."""
    root = tmp_path / "ck"
    save(CheckpointStore(root, 1), 1, model)
    seen: list[str] = []

    def kill(where: str) -> None:
        seen.append(where)
        if where == failpoint:
            raise Killed

    with pytest.raises(Killed):
        save(CheckpointStore(root, 1, failpoint=kill), 2, model)
    later = CheckpointStore(root, 1)
    found = later.newest()
    committed = FAILPOINTS.index(failpoint) >= FAILPOINTS.index("renamed")
    assert found.folder == root / ("step_00000002" if committed else "step_00000001")
    assert found.passed_over == ()
    left = later.clean()
    assert all(folder.name.endswith(".tmp") for folder in left)
    assert later.newest().folder == found.folder and not list(root.glob("*.tmp"))
    assert save(later, 2 if not committed else 3, model).exists()
    assert len(names(root)) == 1


def test_killed_while_slots_write(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1)
    save(store, 1)
    write_slot(store.begin(2), "0-0", 2)
    assert store.newest().folder == tmp_path / "step_00000001"
    assert store.clean() == (tmp_path / "step_00000002.tmp",)


@pytest.mark.parametrize("failpoint", ["older one of the same step moved", "renamed", "committed"])
def test_a_step_that_is_trained_again_replaces_its_checkpoint(tmp_path: Path, failpoint: str) -> None:
    save(CheckpointStore(tmp_path, 1), 1)

    def kill(where: str) -> None:
        if where == failpoint:
            raise Killed

    with pytest.raises(Killed):
        save(CheckpointStore(tmp_path, 1, failpoint=kill), 1)
    store = CheckpointStore(tmp_path, 1)
    store.clean()
    assert store.newest().folder == tmp_path / "step_00000001"
    assert save(store, 1) and names(tmp_path) == ["step_00000001"]


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def zero_tail(folder: Path) -> None:
    path = folder / "slot-0-0.safetensors"
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))


def truncate(folder: Path) -> None:
    path = folder / "slot-0-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def swap(folder: Path) -> None:
    one, other = folder / "slot-0-0.safetensors", folder / "slot-0-1.safetensors"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


def link(folder: Path) -> None:
    path = folder / "slot-0-1.safetensors"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def huge_header(folder: Path) -> None:
    path = folder / "slot-0-1.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def deep_header(folder: Path) -> None:
    path = folder / "slot-0-1.safetensors"
    size = path.stat().st_size
    path.write_bytes(struct.pack("<Q", size - 8) + b"[" * (size - 8))


def replace_folder(folder: Path) -> None:
    shutil.copytree(folder.with_name("step_00000001"), folder, dirs_exist_ok=True)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "first data byte": (lambda folder: flip(folder / "slot-0-0.safetensors", -336), "slot-0-0.safetensors is damaged"),
    "last data byte": (lambda folder: flip(folder / "slot-0-1.safetensors", -1), "slot-0-1.safetensors is damaged"),
    "header": (lambda folder: flip(folder / "slot-0-1.safetensors", 12), "slot-0-1.safetensors"),
    "manifest": (lambda folder: flip(folder / MANIFEST, 100), "manifest.json is damaged"),
    "manifest checksum": (lambda folder: flip(folder / MANIFEST, 15), "manifest.json is damaged"),
    "tokenizer": (lambda folder: flip(folder / "model" / "tokenizer.json", 3), "tokenizer.json is damaged"),
    "zeroed tail": (zero_tail, "slot-0-0.safetensors is damaged"),
    "truncated": (truncate, "slot-0-0.safetensors is damaged: it has"),
    "missing shard": (lambda folder: (folder / "slot-0-1.safetensors").unlink(), "slot-0-1.safetensors is missing"),
    "missing tokenizer": (lambda folder: (folder / "model" / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "swapped shards": (swap, "slot-0-0.safetensors"),
    "symbolic link": (link, "slot-0-1.safetensors is not a regular file"),
    "header of 2^60": (huge_header, "its header claims 1152921504606846976 bytes"),
    "header nested deeply": (deep_header, "its header is not readable"),
    "another step's files": (replace_folder, "holds a checkpoint of step 1"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
    "empty manifest": (lambda folder: (folder / MANIFEST).write_bytes(b""), "manifest.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_named_and_walked_back_over(tmp_path: Path, model: Path, damage: str) -> None:
    root = tmp_path / "ck"
    store = CheckpointStore(root, 2)
    whole = save(store, 1, model)
    spoil, sentence = DAMAGE[damage]
    spoil(save(store, 2, model))
    found = store.newest()
    assert found.folder == whole
    (why,) = found.passed_over
    assert sentence in why and "step_00000002" in why
    with pytest.raises(CheckpointError):
        store.read(root / "step_00000002")


def test_every_single_byte_of_a_slot_file_counts(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1)
    path = save(store, 1) / "slot-0-0.safetensors"
    content = path.read_bytes()
    for offset in range(0, len(content), 7):
        flip(path, offset)
        assert store.newest().folder is None, f"byte {offset} of {len(content)} may be flipped unnoticed"
        path.write_bytes(content)
    assert store.newest().folder


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest as somebody would who can also make its checksum."""
    manifest = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    change(manifest)
    (folder / MANIFEST).write_bytes(seal(msgspec.json.decode(json.dumps(manifest), type=CheckpointManifest)))


@pytest.mark.parametrize(
    "name", ["../step_00000001/slot-0-0.safetensors", "/etc/passwd", "..", "", "a/b", ".hidden", "a\n"]
)
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path, 2)
    folder = save(store, 1)
    forge(folder, lambda manifest: manifest["slots"][0].update(file=name))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        store.validate(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: m.update(format=2), "is of checkpoint format 2; this Nereus reads format 1"),
        (lambda m: m["slots"].pop(0), "embed: 16 of 28 elements are missing"),
        (lambda m: m["slots"].append(m["slots"][0]), "names a file twice"),
        (lambda m: m["slots"][0]["pieces"].pop(), "lacks a kind of embed|holds no whole"),
        (lambda m: m["slots"][0].update(step=5), "is of step 5, not of step 1"),
        (lambda m: m["slots"][0]["pieces"][0].update(stop=[5, 4]), "overlaps"),
        (lambda m: m["slots"][0]["pieces"][0].update(dtype="float64"), "differ in dtype"),
    ],
)
def test_manifests_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    store = CheckpointStore(tmp_path, 2)
    folder = save(store, 1)
    forge(folder, change)
    with pytest.raises(CheckpointError, match=sentence):
        store.validate(folder)


def test_a_tensor_that_nobody_wrote_is_noticed_at_commit(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    folder = store.begin(1)
    entries = [write_slot(folder, name, 1) for name in SHARES]
    with pytest.raises(CheckpointError, match="lacks exp_avg of bias"):
        store.commit(1, entries, {}, tensors=[*SPECS, TensorSpec("bias", (3,), "float32")])
    folder = store.begin(1)
    with pytest.raises(CheckpointError, match=r"holds no whole .*: embed: 16 of 28 elements are missing"):
        store.commit(1, [write_slot(folder, "0-1", 1)], {})
    assert names(tmp_path) == []


def test_a_model_folder_without_a_configuration_is_refused(tmp_path: Path, model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        save(CheckpointStore(tmp_path / "ck", 1), 1, model)


def test_nonsense_entries_are_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1)
    store.begin(1)
    with pytest.raises(CheckpointError, match="manifest entry that is not readable"):
        store.commit(1, [b'{"file": 1}'], {})


def test_at_least_one_is_kept() -> None:
    with pytest.raises(ValueError, match="at least one"):
        CheckpointStore(Path("x"), 0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("a small tmpfs cannot be mounted here (needs root)")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_older_ones_and_a_retry_works(small_disk: Path, model: Path) -> None:
    store = CheckpointStore(small_disk / "ck", 1)
    whole = save(store, 1, model)
    folder = store.begin(2)
    entries = [write_slot(folder, name, 2) for name in SHARES]
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(
        CheckpointError, match=r"step 2 cannot be written to .*No space left.*older checkpoints are untouched"
    ):
        store.commit(2, entries, {}, model=model)
    assert names(small_disk / "ck") == [whole.name]
    assert store.newest().folder == whole
    filler.unlink()
    assert save(store, 2, model).exists()
