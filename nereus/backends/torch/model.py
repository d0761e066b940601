"""Which part of a causal language model does one slot hold, and how is it computed?

Owner: the trainer. Models are transformers' own definitions, built on the meta device from config.json. Only what the
slot's coordinates call for is given memory: its pipeline rank's layers, cut by the model's published tensor-parallel
plan (``tensor_parallel.py``). Everything the slot holds lies in one flat buffer, so that optimizer steps,
gradient sums and norms are single calls.

Invariants (tests/backends/test_train_layouts.py): a layout that does not fit is refused before memory is allocated;
dropout is off; tied weights are one tensor on a slot, and two equal ones if pipelining puts the ends on two slots.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from nereus.backends.torch.tensor_parallel import COLUMNS, ROWS, VOCABULARY, TensorRanks, parallelize
from nereus.core.plan import Layout
from nereus.errors import ConfigError
from nereus.transition.reshard import Piece, TensorSpec, layer_range, piece_of

FAMILIES = ("llama", "qwen2", "qwen3")
"""Model types whose decoder is embedding, layers with a shared rotary embedding, final norm, output head."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

_ALIGNMENT_ELEMENTS = 16
"""Tensors start at multiples of this in the flat buffer: a cache line of float32."""

_SPLIT: Mapping[str, Mapping[str, int | None]] = {
    COLUMNS: {"weight": 0, "bias": 0},
    ROWS: {"weight": 1, "bias": None},
}
_CUT = (*_SPLIT, VOCABULARY)
_SUMMED = "replicated_with_grad_allreduce"

Plan = Mapping[str, str]
"""Module path with ``*`` for layer numbers -> tensor-parallel style."""


class Holding(IntEnum):
    """How a slot's tensor relates to those of the other slots of its unit, in the order of the flat buffer."""

    SHARDED = 0
    """A part of a tensor that no other slot of the unit holds."""
    REPLICATED = 1
    """Equal on all tp ranks, and so is its gradient."""
    SUMMED = 2
    """Equal on all tp ranks, each of which computes a part of its gradient."""
    ALIAS = 3
    """A second copy of a tied tensor that another pipeline rank stores."""


@dataclass(frozen=True)
class Entry:
    """One tensor that a slot holds: its ``piece`` of the whole tensor, at ``offset`` elements of the flat buffer."""

    name: str
    """Name of the parameter in the module; for an alias not the name it is stored under (``piece.name``)."""
    spec: TensorSpec
    piece: Piece
    holding: Holding
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.piece.start, self.piece.stop, strict=True))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """Return this tensor's part of a flat buffer, without a copy."""
        return flat[self.offset : self.offset + self.elements].view(self.shape)


def read_architecture(folder: Path) -> PretrainedConfig:
    """Read the model's config.json; ``ConfigError`` names what is missing or not supported."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json", where="model.path", remedy="name a Hugging Face model folder")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model type {config.model_type!r} is not supported",
            where=str(folder),
            remedy=f"use one of {', '.join(FAMILIES)}",
        )
    sliding = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if sliding:
        raise ConfigError(
            f"layers with {', '.join(sliding)} are not supported",
            where=f"{folder}/config.json",
            remedy="use full attention",
        )
    return config


def check_layout(config: PretrainedConfig, layout: Layout, *, where: str = "train.layout") -> None:
    """Refuse a layout that does not fit the model; ``ConfigError`` names both numbers.

    Key-value heads, heads and the MLP's inner size must divide by tp; layers need not divide by pp (earlier ranks
    take one more), but each rank needs one. A vocabulary that does not divide by tp is kept whole on every tp rank.
    """
    for what, number in (
        ("key-value heads", config.num_key_value_heads),
        ("attention heads", config.num_attention_heads),
        ("intermediate channels", config.intermediate_size),
    ):
        if number % layout.tp:
            fits = [str(tp) for tp in range(1, number + 1) if number % tp == 0]
            raise ConfigError(
                f"{number} {what} do not divide over tp={layout.tp}",
                where=where,
                remedy=f"take tp out of {', '.join(fits)}",
            )
    if layout.pp > config.num_hidden_layers:
        raise ConfigError(
            f"{config.num_hidden_layers} layers cannot fill pp={layout.pp} pipeline ranks",
            where=where,
            remedy=f"take pp of at most {config.num_hidden_layers}",
        )


def build_meta(config: PretrainedConfig, attention: str, dtype: torch.dtype) -> Any:
    """Return the whole model without memory, dropout off."""
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        if getattr(config, name, 0):
            setattr(config, name, 0.0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model.train()


def _pattern(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _tp_plan(model: Any) -> Plan:
    prefix = model.base_model_prefix
    return {f"{prefix}.{path}": style for path, style in (model.config.base_model_tp_plan or {}).items()}


def _vocabulary_splits(config: PretrainedConfig, tp: int) -> bool:
    return bool(config.vocab_size % tp == 0)


def _style(path: str, config: PretrainedConfig, plan: Plan, tp: int) -> str | None:
    """Return the tensor-parallel style of the module at ``path``, or None if it is replicated."""
    if path in ("lm_head", "model.embed_tokens"):
        return VOCABULARY if _vocabulary_splits(config, tp) else None
    style = plan.get(_pattern(path))
    if style is not None and style != _SUMMED and style not in _SPLIT and tp > 1:
        raise ConfigError(
            f"{path} wants tensor-parallel style {style!r}", where="train.layout", remedy="use tp=1 for this model"
        )
    return style


def _split(style: str | None, leaf: str) -> int | None:
    if style == VOCABULARY:
        return 0
    return _SPLIT[style][leaf] if style is not None and style in _SPLIT else None


def _layer(path: str) -> int | None:
    if path.startswith("model.embed_tokens"):
        return -1
    match = re.match(r"model\.layers\.(\d+)\.", path)
    return int(match[1]) if match else None


def tied_names(model: Any) -> dict[str, str]:
    """Return alias -> stored name of parameters that are one object in the module."""
    stored: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in stored:
            aliases[name] = stored[id(parameter)]
        else:
            stored[id(parameter)] = name
    return aliases


def tensor_specs(model: Any, layout: Layout, dtype: str) -> tuple[TensorSpec, ...]:
    """Describe every stored tensor of the whole (meta) ``model``; tied aliases are left out."""
    plan = _tp_plan(model)
    specs = []
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        split = _split(_style(path, model.config, plan, layout.tp), leaf)
        specs.append(TensorSpec(name, tuple(parameter.shape), dtype, split, _layer(name)))
    return tuple(specs)


def lay_out(model: Any, specs: Sequence[TensorSpec], layout: Layout, index: int) -> tuple[tuple[Entry, ...], int]:
    """Return what slot number ``index`` of a unit holds, in the order of its flat buffer, and the buffer's elements."""
    layers = model.config.num_hidden_layers
    pp_rank, tp_rank = layout.coordinates(index)
    plan = _tp_plan(model)
    held: list[tuple[Holding, str, TensorSpec, Piece]] = []
    for spec in specs:
        piece = piece_of(spec, layers, layout, index)
        if piece is None:
            continue
        style = _style(spec.name.rpartition(".")[0], model.config, plan, layout.tp)
        if spec.split is not None or layout.tp == 1:
            holding = Holding.SHARDED
        else:
            holding = Holding.SUMMED if style == _SUMMED else Holding.REPLICATED
        held.append((holding, spec.name, spec, piece))
    by_name = {spec.name: spec for spec in specs}
    for alias, stored in tied_names(model).items():
        if layout.pp > 1 and pp_rank == layout.pp - 1:
            spec = by_name[stored]
            piece = piece_of(spec, layers, layout, tp_rank)
            assert piece is not None  # a vocabulary is only split where it divides
            held.append((Holding.ALIAS, alias, spec, piece))
    entries, end = [], 0
    for holding, name, spec, piece in sorted(held, key=lambda item: item[0]):
        entry = Entry(name, spec, piece, holding, end)
        entries.append(entry)
        end += -(-entry.elements // _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS
    return tuple(entries), end


def holding_slice(entries: Sequence[Entry], elements: int, *holdings: Holding) -> slice:
    """Return the part of the flat buffer that neighbouring kinds of holding occupy."""
    starts = [entry.offset for entry in entries if entry.holding in holdings]
    after = [entry.offset for entry in entries if entry.holding > max(holdings)]
    end = min(after, default=elements)
    return slice(min(starts, default=end), end)


class StageModel(nn.Module):  # type: ignore[misc]
    """The layers of one pipeline rank, as seen by one tp rank.

    ``forward`` takes token ids [rows, width] on the first rank, else hidden states [rows, width, hidden], and returns
    hidden states, normed on the last rank. ``logits`` projects chosen hidden states onto (this tp rank's part of) the
    vocabulary. Rows are right-padded: a token sees those before it only, so no padding mask is needed.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        pp_rank: int,
        *,
        device: torch.device,
        recompute: bool,
        vocabulary_start: int | None,
        ranks: TensorRanks,
    ) -> None:
        super().__init__()
        self._ranks = ranks
        held = layer_range(model.config.num_hidden_layers, layout.pp, pp_rank)
        self.first, self.last = pp_rank == 0, pp_rank == layout.pp - 1
        self.embedding = model.model.embed_tokens if self.first else None
        self.layers = nn.ModuleList(model.model.layers[i] for i in held)
        self.norm = model.model.norm if self.last else None
        self.head = model.lm_head if self.last else None
        self.rotary = type(model.model.rotary_emb)(config=model.config).to(device)
        self.recompute = recompute
        self.whole_layers = 0
        """So many layers are never computed again: to see what one keeps."""
        self.masked = model.config._attn_implementation == "eager"
        self.vocabulary_start = vocabulary_start
        """First token id of this tp rank's part of the vocabulary, or None if it has the whole."""

    def let_go(self) -> None:
        """Forget the process group; nothing can be computed any more."""
        self._ranks.let_go()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(x) if self.embedding is not None else x
        width = hidden.shape[1]
        positions = torch.arange(width, device=hidden.device)[None]
        rotation = self.rotary(hidden, positions)
        # SDPA and flash attention are causal by themselves when they get no mask; the eager form is not.
        mask = causal_mask(width, hidden) if self.masked else None
        again = self.recompute and torch.is_grad_enabled()
        for number, layer in enumerate(self.layers):
            arguments = {"attention_mask": mask, "position_ids": positions, "position_embeddings": rotation}
            if again and number >= self.whole_layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False, **arguments)
            else:
                hidden = layer(hidden, **arguments)
        return self.norm(hidden) if self.norm is not None else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocabulary part] of hidden states [n, hidden]; last pipeline rank only."""
        assert self.head is not None
        result: Tensor = self.head(hidden if self.vocabulary_start is None else self._ranks.shared(hidden))
        return result


def causal_mask(width: int, like: Tensor) -> Tensor:
    """Return the additive mask [1, 1, width, width] that hides later tokens."""
    lowest = torch.finfo(like.dtype).min
    return torch.full((width, width), lowest, dtype=like.dtype, device=like.device).triu(1)[None, None]


def materialize(
    model: Any,
    entries: Sequence[Entry],
    flat: Tensor,
    layout: Layout,
    index: int,
    *,
    tp_group: dist.ProcessGroup | None,
    recompute: bool,
) -> tuple[StageModel, dict[str, nn.Parameter]]:
    """Put the slot's parameters, views of ``flat``, into the meta ``model`` and return its stage and those parameters.

    At tp > 1 the modules of the published plan hold and compute their parts.
    """
    pp_rank, tp_rank = layout.coordinates(index)
    tied = {} if layout.pp > 1 else tied_names(model)  # before their modules are replaced
    plan = _tp_plan(model)
    ranks = TensorRanks(tp_group)
    part = model.config.vocab_size // layout.tp
    if layout.tp > 1:
        paths = {entry.name.rpartition(".")[0] for entry in entries}
        styles = {path: style for path in paths if (style := _style(path, model.config, plan, layout.tp)) in _CUT}
        parallelize(model, styles, ranks, tp_rank * part)
    parameters: dict[str, nn.Parameter] = {}
    for entry in entries:
        path, _, leaf = entry.name.rpartition(".")
        parameters[entry.name] = model.get_submodule(path)._parameters[leaf] = nn.Parameter(entry.view(flat))
    for alias, stored in tied.items():
        path, _, leaf = alias.rpartition(".")
        model.get_submodule(path)._parameters[leaf] = parameters[stored]
    start = tp_rank * part if layout.tp > 1 and _vocabulary_splits(model.config, layout.tp) else None
    stage = StageModel(
        model, layout, pp_rank, device=flat.device, recompute=recompute, vocabulary_start=start, ranks=ranks
    )
    return stage, parameters
