"""The first steps of a program that is not sharded, as sharding it needs to know them: what was asked for, and moments.

Contract: every request of PyTorch's allocator on the device is there, from the first on; which moments there are does
not depend on the number of ranks. All of it is plain data, for another process.
"""

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

MarkKind = Literal[
    "called", "forward", "forwarded", "backward", "gradient", "backwarded", "finished", "update", "updated"
]
"""The model is called first; a unit's forward pass begins, has ended; backward reaches it; a parameter has its
gradient; those of a unit's inputs are there; the whole backward pass is over; the optimizer begins, has ended."""


@dataclass(frozen=True)
class StateTensor:
    parameter: int  #: row of the parameters
    is_alike: bool  #: it has the shape of its parameter


@dataclass(frozen=True)
class Parameter:
    name: str
    unit: int  #: row of the units: what is gathered together
    shape: tuple[int, ...]
    item_bytes: int
    is_trained: bool
    state_bytes: tuple[int, ...]  #: of each tensor of the optimizer's on the device that has its shape
    rest_bytes: int  #: of its other tensors there

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.num_items * self.item_bytes

    def part_items(self, num_ranks: int) -> int:
        """What the first rank has if rows are divided, as FSDP2 pads them."""
        if not self.shape or not self.shape[0]:
            return self.num_items
        return -(-self.shape[0] // num_ranks) * (self.num_items // self.shape[0])


@dataclass(frozen=True)
class Mark:
    kind: MarkKind
    place: int  #: row of the units, of the parameters for "gradient", -1 for the rest
    event: int  #: how many events were before it
    has_gradients: bool  #: whether parameters hold any
    request: int = -1  #: of the gradient's memory; -1: unknown


@dataclass(frozen=True)
class Program:
    """What was asked for: a request's row is its place among the allocations."""

    events: tuple[int, ...]  #: of each event the row of an allocation, or -1 - row where its memory was free again
    sizes: tuple[int, ...]  #: bytes of each request
    streams: tuple[int, ...]  #: of each request; the default stream is 0
    parameters: tuple[int, ...]  #: requests that hold the model's parameters when it is called first
    state: dict[int, StateTensor]  #: requests of the optimizer's tensors
    conf: str  #: the settings of PyTorch's allocator


@dataclass(frozen=True)
class StepMarks:
    units: tuple[str, ...]  #: names: repeated blocks, and last what lies in none
    parameters: tuple[Parameter, ...]
    program: Program
    marks: tuple[Mark, ...]
    steady: int  #: the first mark of the last step
    block_kind: str = ""  #: the class of the first unit that is a block

    @cached_property
    def num_passes(self) -> int:
        root = len(self.units) - 1
        return max(1, sum(mark.kind == "forward" and mark.place == root for mark in self.marks[self.steady :]))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "StepMarks":
        parameters = (
            Parameter(**one | {"shape": tuple(one["shape"]), "state_bytes": tuple(one["state_bytes"])})
            for one in told["parameters"]
        )
        program = told["program"]
        lists = {name: tuple(program[name]) for name in ("events", "sizes", "streams", "parameters")}
        state = {int(row): StateTensor(**one) for row, one in program["state"].items()}
        return cls(
            units=tuple(told["units"]),
            parameters=tuple(parameters),
            program=Program(**lists, state=state, conf=program["conf"]),
            marks=tuple(Mark(**one) for one in told["marks"]),
            steady=told["steady"],
            block_kind=told["block_kind"],
        )
