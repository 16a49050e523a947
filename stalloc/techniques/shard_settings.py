"""How a program's parameters, gradients and optimizer state are divided over ranks: the settings, as data.

Contract: a layout is a triple of factors, of ranks that share one copy each of parameters between forward and backward,
of gradients, and of optimizer state. It is valid if the first two divide the third and that divides the number of
ranks. The triples are those of PaRO (Wu et al. 2023) and AMSP (Chen et al. 2023); cases of them are ZeRO's stages
(Rajbhandari et al. 2020), FSDP, the secondary copy of ZeRO++ (Wang et al. 2023), MiCS' groups (Zhang et al. 2022).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from stalloc.errors import BadInputError

Executor = Literal["fully_shard", "ddp"]
_BLOCKS = "+blocks"
_NAMES = "ddp, zero-1, zero-2, zero-3, hpz:K, mics:K, or P/G/O (three numbers of ranks)"


@dataclass(frozen=True, order=True)
class Layout:
    """The number of ranks over which parameters, gradients and state are each divided; 1: each rank has all of them."""

    parameters: int  #: between the forward and the backward pass
    gradients: int
    state: int

    def is_valid(self, num_ranks: int) -> bool:
        """Whether every rank has the gradients and parameters for its part of the state, and groups come out even."""
        return num_ranks % self.state == 0 == self.state % self.parameters == self.state % self.gradients

    @property
    def executor(self) -> Executor | None:
        """The part of PyTorch that executes the layout; None if there is none."""
        if self.parameters == self.gradients == 1:
            return "ddp"
        return "fully_shard" if self.gradients % self.parameters == 0 else None

    @property
    def divides_optimizer(self) -> bool:
        """Whether the optimizer is divided further than what executes the layout does."""
        return self.state > (1 if self.executor == "ddp" else self.gradients)

    @property
    def stored(self) -> int:
        """Ranks that share one copy of the parameters between two steps."""
        return self.gradients if self.executor == "fully_shard" else self.parameters

    @property
    def reshard_after_forward(self) -> bool | int:
        """The option of this name of `fully_shard` for blocks."""
        return self.parameters if 1 < self.parameters < self.stored else self.parameters == self.stored

    def name(self, num_ranks: int) -> str:
        """What people call it, or the three numbers."""
        p, g, o, n = self.parameters, self.gradients, self.state, num_ranks
        known = {(1, 1, 1): "ddp", (1, 1, n): "zero-1", (1, n, n): "zero-2", (n, n, n): "zero-3"}
        if (p, g, o) in known:
            return known[p, g, o]
        if p == g == o:
            return f"mics:{p}"
        return f"hpz:{p}" if p > 1 and g == o == n else f"{p}/{g}/{o}"


@dataclass(frozen=True)
class ShardWay:
    """A layout, and whether every repeated block is recomputed in backward."""

    layout: Layout
    recomputes_blocks: bool = False


def parse_way(text: str, num_ranks: int, *, must_run: bool = True) -> ShardWay:
    """The way of a name, such as "zero-3" or "zero-3+blocks". Raises BadInputError for others, or what cannot run."""
    layout = parse_layout(text.removesuffix(_BLOCKS), num_ranks)
    if must_run and layout.executor is None:
        raise BadInputError(
            f"{text} can be foreseen only: fully_shard gives each rank the gradients of the parameters that it keeps, "
            f"so they must be over as many ranks as those ({layout.parameters}) or a multiple, not {layout.gradients}: "
            f"run {replace(layout, gradients=layout.parameters).name(num_ranks)} instead."
        )
    return ShardWay(layout, text.endswith(_BLOCKS))


def parse_layout(text: str, num_ranks: int) -> Layout:
    """The layout of a name. Raises BadInputError for an unknown one, or one that so many ranks cannot have."""
    n, (name, _, number) = num_ranks, text.partition(":")
    fixed = {"ddp": (1, 1, 1), "zero-1": (1, 1, n), "zero-2": (1, n, n), "zero-3": (n, n, n), "fsdp": (n, n, n)}
    words = text.split("/")
    if text in fixed:
        factors = fixed[text]
    elif name in ("hpz", "mics") and _is_number(number):
        k = int(number)
        factors = (k, n, n) if name == "hpz" else (k, k, k)
    elif len(words) == 3 and all(map(_is_number, words)):
        factors = (int(words[0]), int(words[1]), int(words[2]))
    else:
        raise BadInputError(f"there is no way to shard called {text[:40]!r}: give {_NAMES}.")
    made = Layout(*factors)
    if not made.is_valid(num_ranks):
        raise BadInputError(
            f"{text} cannot be done by {num_ranks} ranks: the number for optimizer state must divide the number of "
            "ranks, and those for parameters and gradients must divide it."
        )
    return made


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and 0 < len(word) < 7 and int(word) > 0


def valid_layouts(factors: tuple[int, ...], num_ranks: int) -> Iterator[Layout]:
    """All valid triples of these factors: for 1, the ranks of a node and all ranks, the 14 of PaRO."""
    layouts = (Layout(*reversed(one)) for one in itertools.product(factors, repeat=3))
    return (one for one in layouts if one.is_valid(num_ranks))
