"""What the program as it is shows: what each block saves, and what its operations are.

Contract: what is recorded in one process is plain data (JSON) for another. Three steps are observed: the first makes
the optimizer's state; the second is observed operation by operation, which may change its memory; the third only at
the begin and the end of blocks, which does not.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stalloc.figures import plural

OPERATIONS_STEP, MEMORY_STEP = 1, 2
_CAST = "aten._to_copy.default"
_NO_BLOCKS = (
    "no module with parts of its own is repeated in the program, neither in a model nor by being called several times, "
    "and there is no long nn.Sequential (put layers that belong together into a module of their own; with "
    "STALLOC_CUT_FORWARD=1 a forward pass is cut that calls four layers with weights, each in a statement of its own)"
)


@dataclass(frozen=True)
class OperationSeen:
    name: str
    seconds: float  #: estimated
    kept_bytes: int  #: what keeping its result takes; 0: it cannot be kept
    is_lasting: bool = False  #: its result is always kept, since it has effects
    is_random: bool = False
    is_saved: bool = False  #: whether autograd saves its result, or a part of it


@dataclass(frozen=True)
class BlockSeen:
    model: int
    name: str
    kind: str
    why_not: str  #: why it cannot be computed twice; empty if it can
    operations: list[OperationSeen] = field(default_factory=list)
    num_needed: int = 0  #: operations up to the last whose memory backward needs


@dataclass(frozen=True)
class CallSeen:
    """One call of a block in the third step."""

    block: int  #: row of the blocks
    saved_bytes: int  #: what it made and saved for backward, beside its results


@dataclass(frozen=True)
class ProgramSeen:
    """Blocks of the program, and their calls."""

    blocks: list[BlockSeen]
    calls: list[CallSeen]
    step_seconds: float  #: estimated, all operations one after the other
    num_steps: int  #: that the program made
    is_compiled: bool = False  #: whether torch.compile has made any of it
    reads_early: str = ""  #: why the optimizer cannot make its step in the backward pass; empty if nothing was seen

    def has_operation(self, names: tuple[str, ...]) -> bool:
        return any(name in one.name for block in self.blocks for one in block.operations for name in names)

    @property
    def why_no_blocks(self) -> str:
        reasons = [block.why_not for block in self.blocks if block.why_not]
        if self.blocks:
            reasons.append(f"{self.blocks[0].name} was not called with gradients in the steps that were looked at")
        return f"nothing can be recomputed: {[*reasons, _NO_BLOCKS][0]}"

    @property
    def why_some_stay(self) -> list[str]:
        """Which blocks cannot be recomputed, with the first reason."""
        left = [block.why_not for block in self.blocks if block.why_not]
        return [f"{len(left)} of {plural(len(self.blocks), 'block')} stay as they are: {left[0]}"] if left else []

    def without(self, kind: str | None, reason: str) -> "ProgramSeen":
        """What was seen, but that blocks of a kind (None: all blocks) cannot be computed twice, for `reason`."""
        blocks = [
            replace(block, why_not=block.why_not or reason) if kind in (None, block.kind) else block
            for block in self.blocks
        ]
        return replace(self, blocks=blocks)

    def with_casts_once(self, num_operations: Mapping[int, set[int]]) -> "ProgramSeen":
        """What was seen, with nothing kept of blocks some of whose calls find weights cast that other calls cast. The
        number of operations of each call tells; operations of such calls have other positions."""
        blocks = list(self.blocks)
        for row, counts in num_operations.items():
            casts = sum(one.name == _CAST for one in blocks[row].operations)
            if max(counts) - casts <= min(counts) < max(counts):
                plain = [replace(one, kept_bytes=one.kept_bytes * one.is_lasting) for one in blocks[row].operations]
                blocks[row] = replace(blocks[row], operations=plain)
        return replace(self, blocks=blocks)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "ProgramSeen":
        blocks = [
            BlockSeen(**one | {"operations": [OperationSeen(**operation) for operation in one["operations"]]})
            for one in told["blocks"]
        ]
        return cls(**told | {"blocks": blocks, "calls": [CallSeen(**one) for one in told["calls"]]})
