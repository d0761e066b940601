"""How does a GGUF file become a model folder?

``python -m nereus.backends.torch.gguf FILE OUT``. Transformers' own loader dequantizes the weights and converts the
tokenizer; its tensors are written under a clean configuration, because a model that came from a GGUF file still counts
as quantized and refuses to be saved.

Invariant (tests/backends/test_hf_gguf.py): the folder's model gives the logits of the loaded one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig

from nereus.backends.torch.hf import write_folder
from nereus.errors import ConfigError, NereusError
from nereus.transition.reshard import TensorSpec

_NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path", "dtype", "torch_dtype")


def import_gguf(source: Path, out: Path) -> None:
    """Turn the GGUF file ``source`` into the float32 model folder ``out``, tokenizer included.

    ``ConfigError`` if the file is missing or transformers cannot read its architecture.
    """
    if not source.is_file():
        raise ConfigError("no such file", where=str(source), remedy="name a GGUF file")
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise ConfigError(
            f"cannot be read as a GGUF model ({error})",
            where=str(source),
            remedy="install nereus[gguf], and use a Llama, Qwen2 or Qwen3 file",
        ) from error
    values = {key: value for key, value in loaded.config.to_dict().items() if key not in _NOT_OF_THE_MODEL}
    config: PretrainedConfig = type(loaded.config).from_dict(values)
    config.architectures = [type(loaded).__name__]
    config.dtype = torch.float32
    parameters = dict(loaded.named_parameters())
    specs = [TensorSpec(name, tuple(value.shape), "float32") for name, value in parameters.items()]
    with tempfile.TemporaryDirectory(prefix="nereus-gguf-") as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _generation(loaded, tokenizer).save_pretrained(folder)
        tensors = ((name, value.detach().to(torch.float32)) for name, value in parameters.items())
        write_folder(out, specs, tensors, Path(folder))


def _generation(model: Any, tokenizer: Any) -> GenerationConfig:
    """Return the special tokens as generation settings; a chat model ends with its tokenizer's end token."""
    return GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=tokenizer.eos_token_id if tokenizer.eos_token_id is not None else model.config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Import as the command line says; exit code 2 and one line if that cannot be done."""
    parser = argparse.ArgumentParser(prog="nereus import", description=import_gguf.__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    try:
        import_gguf(options.source, options.out)
    except (NereusError, OSError) as error:
        sys.stderr.write(f"nereus: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    sys.stdout.write(f"{options.source} is imported to {options.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
