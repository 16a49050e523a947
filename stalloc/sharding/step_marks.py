"""One step of a program that is not sharded, as sharding it needs to know it: moments, and memory between them.

Contract: memory between two marks is that of the program as it is, exact to the byte; which marks there are does not
depend on the number of ranks. All of it is plain data, for another process. Bytes are what was asked for: PyTorch's
`allocated_bytes` has up to 1 MiB more for each block of its own that it does not split.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

MarkKind = Literal["forward", "forwarded", "backward", "gradient", "backwarded", "finished", "update", "updated"]
"""A unit's forward pass begins, has ended; backward reaches it; a parameter has its gradient; those of a unit's inputs
are there; the whole backward pass is over; the optimizer begins, has ended."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model."""

    name: str
    unit: int  #: row of the units: what is gathered together
    shape: tuple[int, ...]
    item_bytes: int
    is_trained: bool
    state_bytes: tuple[int, ...]  #: of each tensor of the optimizer's on the device that has its shape
    rest_bytes: int  #: of its other tensors there

    @property
    def num_items(self) -> int:
        """The items of the whole parameter, on all ranks together."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def size_bytes(self) -> int:
        """The bytes of the whole parameter, on all ranks together."""
        return self.num_items * self.item_bytes

    def part_items(self, num_ranks: int) -> int:
        """What the first rank has if rows are divided, as FSDP2 pads them."""
        if not self.shape or not self.shape[0]:
            return self.num_items
        return -(-self.shape[0] // num_ranks) * (self.num_items // self.shape[0])


@dataclass(frozen=True)
class Mark:
    """A moment of the step."""

    kind: MarkKind
    place: int  #: row of the units, of the parameters for "gradient", -1 for the rest
    live_bytes: int  #: at it
    peak_bytes: int  #: since the one before
    gradient_bytes: int  #: of gradients that parameters hold at it


@dataclass(frozen=True)
class StepMarks:
    """The step."""

    units: tuple[str, ...]  #: names: repeated blocks, and last what lies in none
    parameters: tuple[Parameter, ...]
    marks: tuple[Mark, ...]
    before_bytes: int  #: when the model was called first
    before_peak_bytes: int  #: the most until then
    block_kind: str = ""  #: the class of the first unit that is a block

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "StepMarks":
        """What `as_json` gave."""
        parameters = (
            Parameter(**{**one, "shape": tuple(one["shape"]), "state_bytes": tuple(one["state_bytes"])})
            for one in told["parameters"]
        )
        return cls(
            units=tuple(told["units"]),
            parameters=tuple(parameters),
            marks=tuple(Mark(**one) for one in told["marks"]),
            before_bytes=told["before_bytes"],
            before_peak_bytes=told["before_peak_bytes"],
            block_kind=told["block_kind"],
        )
