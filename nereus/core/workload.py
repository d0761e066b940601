"""How long are prompts and responses, and how many make one RL step?

Values only. A length distribution is a handful of weighted atoms, so that sums over it are exact and repeatable; the
tail is kept because the longest responses decide when generation ends. Invariants (tests/core/test_workload.py): the
weights sum to 1, the survivor curve falls from 1 to 0, thinning keeps the mean and the longest length.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from statistics import NormalDist

from msgspec import Struct

DEFAULT_ATOMS = 48
"""Atoms that represent a sample: 2 % of the mass each, enough for a mean within 0.1 %."""


class Lengths(Struct, frozen=True):
    """A distribution of lengths in tokens: ascending atoms and the share of sequences at each."""

    tokens: tuple[int, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.shares):
            raise ValueError("a length distribution needs at least one length and one share for each")
        if any(b <= a for a, b in itertools.pairwise(self.tokens)) or self.tokens[0] < 1:
            raise ValueError(f"lengths must be positive and ascending, got {self.tokens}")
        if abs(sum(self.shares) - 1) > 1e-6 or min(self.shares) < 0:
            raise ValueError(f"shares must be non-negative and sum to 1, got {sum(self.shares)}")

    @classmethod
    def fixed(cls, tokens: int) -> Lengths:
        """Every sequence has ``tokens`` tokens."""
        return cls((tokens,), (1.0,))

    @classmethod
    def of(cls, sample: Iterable[float], atoms: int = DEFAULT_ATOMS) -> Lengths:
        """Represent observed lengths by at most ``atoms`` equally likely atoms.

        Each atom is the mean of its slice of the sorted sample; the longest length stays as an atom of its own.
        """
        ordered = sorted(max(1, round(length)) for length in sample)
        if not ordered:
            raise ValueError("a length distribution needs at least one observed length")
        parts = max(1, min(atoms, len(ordered)) - 1)
        bounds = [round(index * (len(ordered) - 1) / parts) for index in range(parts + 1)]
        slices = [ordered[a:b] for a, b in itertools.pairwise(bounds) if b > a]
        atoms_of = [(round(sum(part) / len(part)), len(part)) for part in slices] + [(ordered[-1], 1)]
        return cls.weighted(atoms_of)

    @classmethod
    def weighted(cls, atoms: Iterable[tuple[int, float]]) -> Lengths:
        """Build from (tokens, weight) pairs in any order; equal lengths join."""
        joined: dict[int, float] = {}
        for tokens, weight in atoms:
            joined[tokens] = joined.get(tokens, 0.0) + weight
        total = sum(joined.values())
        return cls(tuple(sorted(joined)), tuple(joined[tokens] / total for tokens in sorted(joined)))

    @classmethod
    def log_normal(cls, mean: float, p95: float, longest: int, atoms: int = DEFAULT_ATOMS) -> Lengths:
        """Represent a log-normal distribution with this mean and 95th percentile, cut at ``longest``.

        ``ValueError`` if no log-normal has them: p95 must be at least the mean and below 3.8 times the mean.
        """
        mu, sigma = log_normal_parameters(mean, p95)
        normal = NormalDist()
        points = (math.exp(mu + sigma * normal.inv_cdf((index + 0.5) / atoms)) for index in range(atoms))
        return cls.weighted((min(longest, max(1, round(point))), 1.0) for point in points)

    @property
    def mean(self) -> float:
        return sum(tokens * share for tokens, share in zip(self.tokens, self.shares, strict=True))

    @property
    def mean_square(self) -> float:
        """Return the mean of squared lengths: attention's work grows with it."""
        return sum(tokens * tokens * share for tokens, share in zip(self.tokens, self.shares, strict=True))

    @property
    def longest(self) -> int:
        return self.tokens[-1]

    def quantile(self, q: float) -> int:
        """Return the smallest length that at least the share ``q`` of sequences does not exceed."""
        for tokens, below in zip(self.tokens, itertools.accumulate(self.shares), strict=True):
            if below >= q - 1e-12:
                return tokens
        return self.longest

    def survivors(self, step: int) -> float:
        """Return the share of sequences that are longer than ``step`` tokens."""
        return sum(share for tokens, share in zip(self.tokens, self.shares, strict=True) if tokens > step)

    def expected_longest(self, count: int) -> float:
        """Return the mean length of the longest of ``count`` independent sequences."""
        expected, below = 0.0, 0.0
        for tokens, share in zip(self.tokens, self.shares, strict=True):
            reached = min(1.0, below + share)
            expected += tokens * (reached**count - below**count)
            below = reached
        return expected

    def scaled(self, factor: float) -> Lengths:
        """Return the distribution with every length multiplied by ``factor``."""
        pairs = zip(self.tokens, self.shares, strict=True)
        return Lengths.weighted((max(1, round(tokens * factor)), share) for tokens, share in pairs)


class Workload(Struct, frozen=True):
    """One RL step: ``groups`` prompts with ``group_size`` responses each, trained in ``minibatches`` updates."""

    prompts: Lengths
    responses: Lengths
    groups: int
    group_size: int = 1
    minibatches: int = 1
    epochs: int = 1
    """How often training goes over the same samples (PPO)."""
    lead: int = 1
    """Steps for which asynchronous generation may run ahead: the bound of staleness. One that is above 1 hides the
    tail of a step's responses behind the steps that follow."""

    def __post_init__(self) -> None:
        for name in ("groups", "group_size", "minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"a workload needs at least one of {name}, got {getattr(self, name)}")
        if self.groups % self.minibatches:
            raise ValueError(f"{self.groups} groups do not split into {self.minibatches} equal minibatches")

    @property
    def samples(self) -> int:
        """Count the sequences that one step trains on."""
        return self.groups * self.group_size

    @property
    def samples_per_minibatch(self) -> int:
        return self.samples // self.minibatches

    @property
    def mean_tokens(self) -> float:
        """Return the mean length of prompt and response together."""
        return self.prompts.mean + self.responses.mean

    @property
    def mean_square_tokens(self) -> float:
        """Return the mean square of prompt plus response, drawn independently."""
        return self.prompts.mean_square + self.responses.mean_square + 2 * self.prompts.mean * self.responses.mean

    @property
    def longest(self) -> int:
        """Return the longest possible sequence in tokens: what buffers must hold."""
        return self.prompts.longest + self.responses.longest


def log_normal_parameters(mean: float, p95: float) -> tuple[float, float]:
    """Return mu and sigma of the log-normal distribution with this mean and 95th percentile.

    ``ValueError`` if there is none: p95 must be at least the mean and below 3.8 times the mean.
    """
    if not 0 < mean <= p95 < math.inf:
        raise ValueError(f"the 95th percentile ({p95}) must be at least the mean ({mean}), which must be positive")
    quantile = NormalDist().inv_cdf(0.95)
    spread = quantile**2 - 2 * math.log(p95 / mean)
    if spread < 0:
        raise ValueError(f"no log-normal has mean {mean} and 95th percentile {p95}; give lengths as a sample")
    sigma = quantile - math.sqrt(spread)
    return math.log(mean) - sigma**2 / 2, sigma
