"""Do model folders give exactly what is in them, and come out as they should?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nereus.backends.torch.hf import INDEX, WEIGHTS, ModelFolder, read_pieces, write_folder
from nereus.errors import CheckpointError, ConfigError
from nereus.transition.reshard import Piece, TensorSpec, whole

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def make(folder: Path, tensors: dict[str, Tensor], *, tied: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": tied}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    save_file(tensors, folder / WEIGHTS)
    return folder


def spec(name: str, tensor: Tensor, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), dtype)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {EMBED: torch.randn(11, 4, generator=random), "a": torch.randn(6, 5, generator=random), "b": torch.randn(3)}


def test_pieces_are_read_in_the_wanted_dtype(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    folder = make(tmp_path / "m", tensors)
    wanted = [
        (spec("a", tensors["a"]), Piece("a", (2, 1), (6, 3))),
        (spec("b", tensors["b"]), Piece("b", (0,), (2,))),
    ]
    found = read_pieces(folder, wanted, torch.float64)
    assert torch.equal(found["a"], tensors["a"][2:6, 1:3].double())
    assert torch.equal(found["b"], tensors["b"][:2].double())


def test_missing_and_misshapen_tensors_are_all_listed(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    folder = make(tmp_path / "m", tensors)
    absent, other = TensorSpec("c", (3,), "float32"), TensorSpec("a", (6, 6), "float32")
    wanted = [(absent, whole(absent)), (other, whole(other))]
    with pytest.raises(CheckpointError, match=r"c is missing; a has shape \(6, 5\), the model needs \(6, 6\)"):
        read_pieces(folder, wanted, torch.float32)


@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
def test_a_tied_tensor_is_found_under_either_name(tmp_path: Path, tensors: dict[str, Tensor], stored: str) -> None:
    embed = tensors[EMBED]
    content = {"embedding": {EMBED: embed}, "head": {HEAD: embed}, "both": {EMBED: embed, HEAD: embed.clone()}}[stored]
    folder = make(tmp_path / "m", content, tied=True)
    found = read_pieces(folder, [(spec(EMBED, embed), Piece(EMBED, (3, 0), (9, 4)))], torch.float32)
    assert torch.equal(found[EMBED], embed[3:9])


def test_a_tie_that_is_none_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """R07, R09: config.json says tied, the weights differ. Either one would be lost silently."""
    embed = tensors[EMBED]
    folder = make(tmp_path / "m", {EMBED: embed, HEAD: embed + 1}, tied=True)
    with pytest.raises(ConfigError, match=r"config\.json: tie_word_embeddings is true, but the stored lm_head.*set"):
        read_pieces(folder, [(spec(EMBED, embed), whole(spec(EMBED, embed)))], torch.float32)
    untied = make(tmp_path / "u", {EMBED: embed, HEAD: embed + 1})
    both = read_pieces(untied, [(spec(n, embed), whole(spec(n, embed))) for n in (EMBED, HEAD)], torch.float32)
    assert torch.equal(both[HEAD], embed + 1)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    folder = make(tmp_path / "m", tensors)
    head = spec(HEAD, tensors[EMBED])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        read_pieces(folder, [(head, whole(head))], torch.float32)


def write(out: Path, source: Path, tensors: dict[str, Tensor], shard_bytes: int = 1 << 30) -> None:
    specs = [spec(name, value) for name, value in tensors.items()]
    write_folder(out, specs, iter(tensors.items()), source, changes={"dtype": "float32"}, shard_bytes=shard_bytes)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 200, 1])
def test_a_written_folder_reads_back(tmp_path: Path, tensors: dict[str, Tensor], shard_bytes: int) -> None:
    source = make(tmp_path / "m", {})
    out = tmp_path / "out"
    write(out, source, tensors, shard_bytes)
    specs = [spec(name, value) for name, value in tensors.items()]
    found = read_pieces(out, [(s, whole(s)) for s in specs], torch.float32)
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert (out / INDEX).exists() == (shard_bytes < 1 << 30)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert (out / "tokenizer.json").exists() and (out / "generation_config.json").exists()
    with ModelFolder(out) as folder:
        assert folder.names == set(tensors)


def test_what_was_not_announced_is_not_written(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    source = make(tmp_path / "m", {})
    out = tmp_path / "out"
    specs = [spec("a", tensors["a"])]
    with pytest.raises(ValueError, match="what came is b"):
        write_folder(out, specs, iter([("b", tensors["b"])]), source)
    with pytest.raises(ValueError, match="what came is nothing"):
        write_folder(out, specs, iter([]), source)
    with pytest.raises(ValueError, match="not announced: b"):
        write_folder(out, specs, iter([("a", tensors["a"]), ("b", tensors["b"])]), source)
    assert not out.exists(), "a folder appears only when it is whole"


def test_an_existing_folder_is_not_overwritten(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    source = make(tmp_path / "m", tensors)
    with pytest.raises(ConfigError, match="is not empty; choose a new folder"):
        write(source, source, tensors)
    assert load_file(source / WEIGHTS).keys() == tensors.keys()


def test_folders_that_are_no_models_are_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    folder = make(tmp_path / "m", tensors)
    wanted = [(spec("a", tensors["a"]), whole(spec("a", tensors["a"])))]
    (folder / WEIGHTS).write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        read_pieces(folder, wanted, torch.float32)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickled ones are never read"):
        read_pieces(folder, wanted, torch.float32)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../m/pytorch_model.bin"}}))
    with pytest.raises(CheckpointError, match="names files outside its folder"):
        read_pieces(folder, wanted, torch.float32)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"lacks weight files .*: model-1\.safetensors"):
        read_pieces(folder, wanted, torch.float32)
    (folder / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_pieces(folder, wanted, torch.float32)
