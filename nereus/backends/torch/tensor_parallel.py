"""How do the tensor ranks of a stage compute one layer together?

Owner: the trainer. Every rank holds its part of the weights of a split module, as the model's published plan says, and
computes with it alone. What the ranks find in parts is added up four times a decoder layer: forward at the end of each
of its two blocks, backward at their beginning, where all projections that read one input share its gradient's sum.

Why not DTensor: it decides for every new shape of an operation's input anew and keeps the decision for ever; here every
micro-batch may have a shape of its own. It also adds up the input's gradient of each projection for itself
(``benchmarks/tensor_parallel.py`` measures both).

Invariants (tests/backends/test_train_layouts.py): values and gradients are those of the whole module; a module that is
let go knows its process group no longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

COLUMNS, ROWS, VOCABULARY = "colwise", "rowwise", "vocabulary"


class TensorRanks:
    """The process group of the ranks that hold parts of the same modules; None if one rank holds all."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def shared(self, x: Tensor) -> Tensor:
        """Return ``x``, equal on all ranks; its gradient is the sum of theirs."""
        result: Tensor = _Shared.apply(x, self._group) if self._group is not None else x
        return result

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, put where ``x`` was; the gradient of each is that of the sum."""
        result: Tensor = _Summed.apply(x, self._group) if self._group is not None else x
        return result

    def let_go(self) -> None:
        """Forget the process group; nothing can be added up any more."""
        self._group = None


class Sum(nn.Module):  # type: ignore[misc]
    """Adds up what the ranks found: a module of its own, so that its time can be told from its owner's."""

    def __init__(self, ranks: TensorRanks) -> None:
        super().__init__()
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.summed(x)


class RowLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer of which this rank has some columns of inputs; the bias, which all have, is added once."""

    def __init__(self, whole: nn.Linear, ranks: TensorRanks) -> None:
        super().__init__(whole.in_features, whole.out_features, whole.bias is not None, device="meta")
        self.sum = Sum(ranks)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.sum(F.linear(x, self.weight))
        return result if self.bias is None else result + self.bias


class VocabularyEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding of which this rank has some rows; other tokens count zero here."""

    def __init__(self, whole: nn.Embedding, ranks: TensorRanks, first: int) -> None:
        super().__init__(whole.num_embeddings, whole.embedding_dim, device="meta")
        self.sum = Sum(ranks)
        self._first = first
        self._padding = whole.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        held = len(self.weight)
        local = ids - self._first
        elsewhere = (local < 0) | (local >= held)
        # The row of the padding token is never learned from; it may be another rank's.
        padding = None if self._padding is None else self._padding - self._first
        padding = padding if padding is not None and 0 <= padding < held else None
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight, padding)
        result: Tensor = self.sum(found.masked_fill(elsewhere[..., None], 0.0))
        return result


def parallelize(model: nn.Module, styles: Mapping[str, str], ranks: TensorRanks, first_token: int) -> None:
    """Make the modules at the paths of ``styles`` compute their parts.

    A module that is split by columns stays as it is: its owner adds up the gradient of what it reads. To be called
    before parameters are put into the modules. ``first_token``: of this rank's part of the vocabulary.
    """
    for path, style in styles.items():
        module: Any = model.get_submodule(path)
        if style == ROWS:
            model.set_submodule(path, RowLinear(module, ranks))
        elif isinstance(module, nn.Embedding):
            model.set_submodule(path, VocabularyEmbedding(module, ranks, first_token))
    owners = {path.rpartition(".")[0] for path, style in styles.items() if style == COLUMNS}
    for owner in owners:
        model.get_submodule(owner).register_forward_pre_hook(_sharing(ranks), with_kwargs=True)


def _sharing(ranks: TensorRanks):  # type: ignore[no-untyped-def]
    def share(_module: nn.Module, arguments: Any, named: Any) -> Any:
        if arguments:
            return (ranks.shared(arguments[0]), *arguments[1:]), named
        return arguments, named | {"hidden_states": ranks.shared(named["hidden_states"])}

    return share


class _Shared(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
