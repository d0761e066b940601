"""Does an imported GGUF file compute what transformers' own loader gives?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nereus.backends.torch.gguf import import_gguf, main
from nereus.errors import ConfigError

gguf: Any = pytest.importorskip("gguf", reason="the extra nereus[gguf] is not installed")
pytest.importorskip("accelerate", reason="the extra nereus[gguf] is not installed")

LAYERS, HIDDEN, HEADS, KV, INNER = 2, 32, 4, 2, 64
TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_gguf(path: Path) -> None:
    """Write a tiny tied Llama with a byte-level vocabulary in the file format of llama.cpp."""
    words = ["<pad>", "<s>", "</s>", *(chr(code) for code in range(33, 127)), "ab"]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": KV}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes, **heads, tie_word_embeddings=True))
    values = {name: value.detach().float().numpy() for name, value in model.named_parameters()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3, *([1] * (len(words) - 3))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_tensor("token_embd.weight", values["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", values["model.norm.weight"])
    for layer in range(LAYERS):
        for short, long in TENSORS.items():
            writer.add_tensor(f"blk.{layer}.{short}.weight", values[f"model.layers.{layer}.{long}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_gguf_file_becomes_a_model_folder(tmp_path: Path) -> None:
    source, out = tmp_path / "tiny.gguf", tmp_path / "out"
    write_gguf(source)
    import_gguf(source, out)
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **where)
    loaded = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    tokens = torch.arange(10).view(1, 10)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, expected(tokens).logits)
    assert loaded.dtype == torch.float32 and not hasattr(loaded.config, "quantization_config")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert tokenizer.eos_token_id == 2
    assert tokenizer("abc")["input_ids"] == AutoTokenizer.from_pretrained(tmp_path, **where)("abc")["input_ids"]
    assert loaded.generation_config.eos_token_id == 2


def test_what_is_no_gguf_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        import_gguf(tmp_path / "absent.gguf", tmp_path / "out")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    assert main([str(tmp_path / "bad.gguf"), str(tmp_path / "out")]) == 2
    assert "cannot be read as a GGUF model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
