"""Does an exported model compute what the trained one does, whatever layout trained it?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nereus.backends.torch import checkpoint
from nereus.backends.torch.export import export, find_checkpoint, main
from nereus.core.plan import Layout
from nereus.errors import CheckpointError, ConfigError
from nereus.runtime.checkpoints import CheckpointStore
from nereus.transition.reshard import TensorSpec, publication

LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2 tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
}
COLUMN, ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def describe(name: str, shape: tuple[int, ...]) -> TensorSpec:
    """Split as a trainer does: by columns, by rows, or the vocabulary (R10: a bias goes with its weight)."""
    layer = -1 if "embed" in name else int(name.split(".")[2]) if "layers" in name else None
    column = any(part in name for part in (*COLUMN, "embed", "lm_head"))
    split = 0 if column else 1 if any(part in name for part in ROW) and len(shape) == 2 else None
    return TensorSpec(name, shape, "float32", split, layer)


def train_and_save(root: Path, kind: str, layout: Layout, replicas: int) -> tuple[Any, Path]:
    """Return a model and a checkpoint of it that slots of ``layout`` wrote."""
    torch.manual_seed(0)
    model: Any = MODELS[kind]().float().eval()
    source = root / "source"
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    values = dict(model.named_parameters())
    specs = [describe(name, tuple(value.shape)) for name, value in values.items()]
    store = CheckpointStore(root / "run" / "checkpoints", 2)
    folder = store.begin(3)
    entries = []
    for replica in range(replicas):
        for index in range(layout.slots):
            mine = publication(specs, LAYERS, layout, index, replica, replicas)
            held = {}
            for piece in mine:
                part = values[piece.name].detach()[tuple(map(slice, piece.start, piece.stop))]
                for scale, what in enumerate(("parameter", "exp_avg", "exp_avg_sq"), 1):
                    held[what, piece.name] = (piece, part * scale)
            name = f"{replica}-{index}"
            entries.append(checkpoint.save_slot(folder, slot_name=name, step=3, pieces=held, counters={}))
    return model, store.commit(3, entries, {}, model=source, tensors=specs)


@pytest.mark.parametrize(
    ("kind", "layout", "replicas"),
    [
        pytest.param("llama", Layout(), 1, marks=pytest.mark.deep),
        pytest.param("llama", Layout(2, 2), 2, marks=pytest.mark.deep),
        ("llama tied", Layout(2, 2), 1),
        pytest.param("qwen2 tied", Layout(4, 1), 2, marks=pytest.mark.deep),
    ],
)
def test_logits_of_the_exported_model_are_equal(tmp_path: Path, kind: str, layout: Layout, replicas: int) -> None:
    model, folder = train_and_save(tmp_path, kind, layout, replicas)
    out = tmp_path / "out"
    export(folder, out)
    loaded = AutoModelForCausalLM.from_pretrained(out, local_files_only=True).eval()
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    tied = kind.endswith("tied")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert (out / "generation_config.json").exists() and (out / "tokenizer.json").exists()


def test_the_command_exports_a_run_in_another_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = train_and_save(tmp_path, "llama tied", Layout(1, 2), 1)
    out = tmp_path / "out"
    assert main([str(tmp_path / "run"), str(out), "--dtype", "bfloat16"]) == 0
    assert "is exported to" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.bfloat16())
    assert main([str(tmp_path / "run"), str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    _, folder = train_and_save(tmp_path, "llama", Layout(), 1)
    with pytest.raises(ConfigError, match="neither a checkpoint nor a run folder"):
        find_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="has no checkpoint of step 7; take one of 3"):
        find_checkpoint(tmp_path / "run", 7)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True, "vocab_size": 40}))
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight is not of this model; model\.embed_tokens\.weight has shape"
    ):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    config.unlink()
    with pytest.raises(CheckpointError, match="holds no model configuration"):
        export(folder, tmp_path / "out")
