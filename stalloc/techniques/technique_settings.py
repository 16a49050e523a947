"""What is done to a program so that it needs less memory: the settings of all techniques, as data.

Contract: settings hold no objects of the program, so they can be written to a file, and whatever such a file says,
settings can only choose among the techniques that are here, and name no file. The default does nothing. Blocks are
named by the order in which models are first called, by their name within the model (a model that is a block itself has
that of its class) and by class; operations by position and name.

How a program is divided over ranks is a triple of factors, of ranks that share one copy each of parameters between
forward and backward, of gradients, and of optimizer state. It is valid if the first two divide the third and that
divides the number of ranks. The triples are those of PaRO (Wu et al. 2023) and AMSP (Chen et al. 2023); cases of them
are ZeRO's stages (Rajbhandari et al. 2020), FSDP, the secondary copy of ZeRO++ (Wang et al. 2023) and MiCS' groups
(Zhang et al. 2022).
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from stalloc.errors import BadInputError
from stalloc.techniques.parts import Shares

_MAX_BLOCKS, _MAX_KEPT, _MAX_NAME = 100_000, 100_000, 500
_MOST = 1 << 62


@dataclass(frozen=True)
class BlockSettings:
    """One block that is recomputed."""

    model: int  #: the number of its model
    name: str  #: within the model
    kind: str  #: its class
    keep: tuple[tuple[int, str], ...] = ()  #: operations whose results are kept: position in the block, name


@dataclass(frozen=True)
class RecomputeSettings:
    """All blocks that are recomputed; none: the program as it is."""

    blocks: tuple[BlockSettings, ...] = ()

    def of_model(self, model: int) -> dict[str, BlockSettings]:
        return {block.name: block for block in self.blocks if block.model == model}

    def as_json(self) -> list[dict[str, Any]]:
        """Plain values (JSON) for a file, in which blocks with the same operations share a row."""
        rows: dict[tuple[int, str, tuple[tuple[int, str], ...]], list[str]] = {}
        for block in self.blocks:
            rows.setdefault((block.model, block.kind, block.keep), []).append(block.name)
        return [
            {"model": model, "kind": kind, "keep": [list(one) for one in keep], "names": names}
            for (model, kind, keep), names in rows.items()
        ]


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """What of a program is kept in host memory and on disk; by default nothing."""

    host_bytes: int = 0  #: of host memory, at the most
    disk_bytes: int = 0  #: on disk, at the most, of state and parameters that have no room in host memory
    paged_window_bytes: int = 0
    """Bytes of paged optimizer state on the device at once; 1: one part of it at a time. 0: state is not paged."""
    streamed_window: int = 0
    """How many repeated blocks have their parameters on the device at once; 0: all. Needs a paged optimizer."""
    device_share: float = 0.0  #: of the parameters, by bytes, whose state stays on the device
    processor_share: float = 0.0  #: of the parameters, by bytes, that the processor updates
    sends_gradients: bool = False
    """Whether gradients leave in backward, of what the processor updates and of streamed layers."""
    updates_beside_backward: bool = False  #: whether the processor updates streamed layers as their gradients come

    @property
    def shares(self) -> Shares:
        """The shares kept on the device and updated by the processor."""
        return Shares(self.device_share, self.processor_share)

    def __bool__(self) -> bool:
        return bool(self.paged_window_bytes)


@dataclass(frozen=True, kw_only=True)
class ActivationSettings:
    """Which share of what is saved for backward goes to the host (Yuan et al. 2024, section 4); by default none."""

    ratio: float = 0.0  #: of saved bytes, 0 to 1
    window_bytes: int = 0
    """Bytes on their way to the host at once, still held on the device, or back early; 0: each copy is waited for."""
    host_bytes: int = 0  #: of host memory, at the most

    def __bool__(self) -> bool:
        return self.ratio > 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TechniqueSettings:
    """The settings of all techniques, one field for each."""

    recompute: RecomputeSettings = field(default_factory=RecomputeSettings)
    step_in_backward: bool = False  #: whether every optimizer makes its step in the backward pass
    activation_share: float = 1.0  #: share of what torch.compile's code would save that its partitioner may save
    tiers: TierSettings = field(default_factory=TierSettings)
    activations: ActivationSettings = field(default_factory=ActivationSettings)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that may be used at the most; 0: none is used."""
        return max(self.tiers.host_bytes if self.tiers else 0, self.activations.host_bytes if self.activations else 0)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "recompute": self.recompute.as_json()}

    @classmethod
    def from_json(cls, told: Any) -> "TechniqueSettings":
        """The settings that `as_json` wrote; a later field has its default. Raises ValueError for anything else."""
        default = cls().as_json()
        if not isinstance(told, dict) or "recompute" not in told:
            raise ValueError("its settings are damaged")
        if unknown := sorted(map(str, set(told) - set(default))):
            raise ValueError(f"it has settings that this stalloc does not know, {unknown[0][:40]}")
        told = default | told
        if unclear := [one.name for one in fields(cls) if one.type is bool and type(told[one.name]) is not bool]:
            raise ValueError(f"its setting {unclear[0]} is neither true nor false")
        if not _is_share(told["activation_share"]):
            raise ValueError("what compiled code saves is no share")
        told["recompute"] = _blocks_from_json(told["recompute"])
        told["activation_share"] = float(told["activation_share"])
        told["tiers"] = _fields_from_json(TierSettings, told["tiers"], "what it keeps in host memory")
        told["activations"] = activations_from_json(told["activations"])
        return cls(**told)


def activations_from_json(told: Any) -> ActivationSettings:
    """The settings that `as_json` wrote; a later field has its default. Raises ValueError for anything else."""
    what = "what it keeps of activations in host memory"
    if not isinstance(told, dict) or "ratio" not in told:
        raise ValueError(f"{what} is damaged")
    return _fields_from_json(ActivationSettings, told, what)


def _fields_from_json(kind: Any, told: Any, what: str) -> Any:
    types: dict[str, Any] = {one.name: one.type for one in fields(kind)}
    if not isinstance(told, dict) or not set(told) <= set(types):
        raise ValueError(f"{what} is damaged")
    for name, value in told.items():
        if types[name] is bool and type(value) is not bool:
            raise ValueError("what it does with gradients is neither true nor false")
        if types[name] is int and not (type(value) is int and 0 <= value < _MOST):
            raise ValueError(f"{what} is no number of bytes")
        if types[name] is float and not _is_share(value):
            raise ValueError(f"{what} is no share")
    return kind(**{name: types[name](value) for name, value in told.items()})


def _blocks_from_json(rows: Any) -> RecomputeSettings:
    _check(isinstance(rows, list) and len(rows) <= _MAX_BLOCKS, "its settings are no list")
    blocks: list[BlockSettings] = []
    for row in rows:
        _check(isinstance(row, dict) and set(row) == {"model", "kind", "keep", "names"}, "a row of settings is damaged")
        _check(type(row["model"]) is int and 0 <= row["model"] < _MAX_BLOCKS, "a setting names no model")
        _check(_is_name(row["kind"]), "a setting names no class")
        _check(isinstance(row["names"], list) and all(map(_is_name, row["names"])), "a setting names no blocks")
        _check(isinstance(row["keep"], list) and len(row["keep"]) <= _MAX_KEPT, "what is kept is no list")
        for one in row["keep"]:
            is_pair = isinstance(one, list) and len(one) == 2 and type(one[0]) is int and _is_name(one[1])
            _check(is_pair and 0 <= one[0] < 2**31, "what is kept is no operation")
        _check(len(blocks) + len(row["names"]) <= _MAX_BLOCKS, "its settings name too many blocks")
        keep = tuple((position, name) for position, name in row["keep"])
        blocks += [BlockSettings(row["model"], name, row["kind"], keep) for name in row["names"]]
    return RecomputeSettings(tuple(blocks))


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text) <= _MAX_NAME


def _check(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(reason)


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
