"""How does a checkpoint become a model folder that transformers loads?

``python -m nereus.backends.torch.export CHECKPOINT OUT [--dtype bfloat16] [--step N]``. A checkpoint holds all that is
needed: the masters of every layout, the configuration and the tokenizer. CHECKPOINT may also be a run folder.

Invariants (tests/backends/test_hf_export.py): the exported tensors are exactly those of the model class that
config.json names; logits of the exported model equal those of the trained one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nereus.backends.manifest import read_manifest, stored_tensors
from nereus.backends.torch.checkpoint import is_checkpoint, model_folder, read_pieces
from nereus.backends.torch.hf import write_folder
from nereus.errors import CheckpointError, ConfigError, NereusError
from nereus.transition.reshard import TensorSpec, listing, whole

DTYPES = ("float32", "bfloat16", "float16", "float64")


def export(checkpoint: Path, out: Path, dtype: str | None = None) -> None:
    """Write the parameters of a committed checkpoint as the model folder ``out``.

    ``dtype`` is by default that of config.json. ``CheckpointError`` if the checkpoint's tensors are not the model's.
    """
    source = model_folder(checkpoint)
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{checkpoint} holds no model configuration; it cannot be exported by itself")
    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    dtype = dtype or str(config.dtype or torch.float32).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(
            f"{dtype!r} is not a number format of weights", where="--dtype", remedy=f"take {', '.join(DTYPES)}"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = stored_tensors(read_manifest(checkpoint)).get("parameter", ())
    _require_equal(checkpoint, shapes, {spec.name: spec.shape for spec in stored})
    specs = [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]
    write_folder(out, specs, _tensors(checkpoint, specs, dtype), source, changes={"dtype": dtype})


def find_checkpoint(folder: Path, step: int | None = None) -> Path:
    """Return the checkpoint that ``folder`` is, or that of ``step`` (default: the newest) of the run that it is."""
    if is_checkpoint(folder):
        return folder
    found = {
        int(path.name.removeprefix("step_")): path
        for path in (folder / "checkpoints").glob("step_*")
        if is_checkpoint(path)
    }
    if not found:
        raise ConfigError(
            "is neither a checkpoint nor a run folder with one",
            where=str(folder),
            remedy="name runs/NAME or a step folder",
        )
    chosen = max(found) if step is None else step
    if chosen not in found:
        steps = ", ".join(map(str, sorted(found)))
        raise ConfigError(f"has no checkpoint of step {step}", where=str(folder), remedy=f"take one of {steps}")
    return found[chosen]


def _require_equal(checkpoint: Path, model: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> None:
    problems = [f"{name} is missing" for name in model if name not in stored]
    problems += [f"{name} is not of this model" for name in stored if name not in model]
    problems += [f"{n} has shape {stored[n]}, not {model[n]}" for n in model if n in stored and stored[n] != model[n]]
    if problems:
        raise CheckpointError(f"the parameters in {checkpoint} are not those of its config.json: {listing(problems)}")


def _tensors(checkpoint: Path, specs: Sequence[TensorSpec], dtype: str) -> Iterator[tuple[str, Tensor]]:
    for spec in specs:
        tensor = read_pieces(checkpoint, [("parameter", spec, whole(spec))])["parameter", spec.name]
        yield spec.name, tensor.to(getattr(torch, dtype))


def main(arguments: Sequence[str] | None = None) -> int:
    """Export as the command line says; exit code 2 and one line if that cannot be done."""
    parser = argparse.ArgumentParser(prog="nereus export", description=export.__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--dtype", choices=DTYPES)
    options = parser.parse_args(arguments)
    try:
        chosen = find_checkpoint(options.checkpoint, options.step)
        export(chosen, options.out, options.dtype)
    except (NereusError, OSError) as error:
        sys.stderr.write(f"nereus: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    sys.stdout.write(f"{chosen} is exported to {options.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
