"""What a step of the program as it is shows: what each block saves, what its operations are, how memory goes.

Contract: what is recorded in one process is plain data (JSON) for another. Three steps are looked at: the first makes
the optimizer's state, the second is looked at operation by operation, which may change its memory, and the third only
at the begin and the end of blocks, which does not.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Event = tuple[Literal["peak", "saved", "again"], int, int]
"""What happens in a step, in order. ("peak", bytes, 0): the most that was allocated since the last event;
("saved", call, bytes): a call of a block has ended, which holds so much more than its results; ("again", call, bytes):
backward comes to that call, with so much allocated, and would compute it again."""


@dataclass(frozen=True)
class OperationSeen:
    """One operation of a block."""

    name: str
    seconds: float  #: estimated
    kept_bytes: int  #: what keeping its result takes; 0: it cannot be kept
    is_lasting: bool = False  #: its result is always kept, since it has effects
    is_random: bool = False
    is_saved: bool = False  #: whether autograd saves its result, or a part of it


@dataclass(frozen=True)
class BlockSeen:
    """One repeated block."""

    model: int
    name: str
    kind: str
    why_not: str  #: why it cannot be computed twice; empty if it can
    operations: list[OperationSeen] = field(default_factory=list)
    num_needed: int = 0  #: operations up to the last whose memory backward needs


@dataclass(frozen=True)
class CallSeen:
    """One call of a block in the step."""

    block: int  #: row of the blocks
    saved_bytes: int  #: what it made and saved for backward, beside its results
    input_bytes: int  #: of its inputs that nobody else saves
    transient_bytes: int  #: the most that it needs beyond what it saves and returns, while it runs


@dataclass(frozen=True)
class StepSeen:
    """A step of the program as it is."""

    blocks: list[BlockSeen]
    calls: list[CallSeen]
    events: list[Event]
    step_seconds: float  #: estimated, all operations one after the other

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        return {
            "blocks": [{**vars(one), "operations": [list(vars(op).values()) for op in one.operations]}
                       for one in self.blocks],
            "calls": [list(vars(one).values()) for one in self.calls],
            "events": self.events,
            "step_seconds": self.step_seconds,
        }  # fmt: skip

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "StepSeen":
        """What `as_json` gave."""
        blocks = [
            BlockSeen(**{**one, "operations": [OperationSeen(*op) for op in one["operations"]]})
            for one in told["blocks"]
        ]
        events: list[Event] = [(event[0], event[1], event[2]) for event in told["events"]]
        return cls(blocks, [CallSeen(*one) for one in told["calls"]], events, told["step_seconds"])


def rounded(size_bytes: int) -> int:
    """As torch counts a request."""
    return (size_bytes + 511) & -512
