"""A program as online eviction sees it: calls, what each reads and makes, and when the program lets go of what.

Contract: a storage is memory; a tensor is what one operation put there. A storage has one tensor that made it, and one
more for each view and each change in place. Operations are numbered in the order in which the program calls them, and
read only what operations before them made. Nothing here knows of a budget.
"""

import enum
import itertools
from dataclasses import dataclass, field

import numpy as np

from stalloc.columns import Column, Rows, Sizes


class Step(enum.IntEnum):
    """What the program does next."""

    CONSTANT = 0  #: a storage is there that nothing can make again; it stays until the program lets go of it
    CALL = 1  #: an operation
    HOLD = 2  #: one more name for a tensor
    LET_GO = 3  #: one name less
    KEEP = 4  #: a tensor has to be there from now on


@dataclass(frozen=True, eq=False, kw_only=True)
class Instructions:
    """s storages, t tensors, k operations, e steps of the program."""

    size: Sizes  #: (s,) bytes
    is_constant: Column  #: (s,) bool
    tensor_storage: Rows  #: (t,)
    tensor_op: Rows  #: (t,) which made it; -1 for a constant
    is_view: Column  #: (t,) bool: of a storage that another tensor made
    op_ticks: Column  #: (k,) int64: what each call takes
    op_work_bytes: Sizes  #: (k,) that each call needs for itself alone
    arg_begin: Rows  #: (k + 1,)
    args: Rows  #: tensors
    out_begin: Rows  #: (k + 1,)
    outs: Rows  #: tensors
    step_kind: Column  #: (e,) of Step
    step_of: Rows  #: (e,) the storage, operation or tensor
    ticks_per_second: float | None  #: None where the recording does not say
    constants_stay: bool  #: what was evicted may need one again that the program let go of


@dataclass(eq=False)
class InstructionWriter:
    """Collects instructions in the order in which the program does things."""

    sizes: list[int] = field(default_factory=list)
    constants: list[bool] = field(default_factory=list)
    tensors: list[tuple[int, int, bool]] = field(default_factory=list)
    ops: list[tuple[int, int, list[int], list[int]]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)

    def constant(self, num_bytes: int) -> int:
        """A storage that is there from now on, held once; its tensor comes back."""
        storage = self._storage(num_bytes, is_constant=True)
        self.tensors.append((storage, -1, False))
        self.steps.append((Step.CONSTANT, storage))
        self.hold(len(self.tensors) - 1)
        return len(self.tensors) - 1

    def call(self, ticks: int, args: list[int], made: list[tuple[int, int]], work_bytes: int = 0) -> list[int]:
        """An operation, and the tensors that it made, each held once.

        `made` has, for each, its bytes and -1, or 0 and the tensor in whose storage it lies.
        """
        op, outs = len(self.ops), []
        for num_bytes, of_tensor in made:
            is_view = of_tensor >= 0
            storage = self.tensors[of_tensor][0] if is_view else self._storage(num_bytes)
            self.tensors.append((storage, op, is_view))
            outs.append(len(self.tensors) - 1)
        self.ops.append((ticks, work_bytes, args, outs))
        for tensor in outs:
            self.hold(tensor)
        self.steps.append((Step.CALL, op))
        return outs

    def hold(self, tensor: int) -> None:
        """One more name."""
        self.steps.append((Step.HOLD, tensor))

    def let_go(self, tensor: int) -> None:
        """One name less."""
        self.steps.append((Step.LET_GO, tensor))

    def keep(self, tensor: int) -> None:
        """What the program still has at its end has to be there."""
        self.steps.append((Step.KEEP, tensor))

    def size_of(self, tensor: int) -> int:
        """Bytes of the storage of a tensor."""
        return self.sizes[self.tensors[tensor][0]]

    def done(self, ticks_per_second: float | None = None, *, constants_stay: bool = True) -> Instructions:
        """All of it, as columns."""
        ticks, work, args, outs = zip(*self.ops, strict=True) if self.ops else ((), (), (), ())
        storage, op, is_view = np.array(self.tensors, np.int64).reshape(-1, 3).T.copy()
        kind, of = np.array(self.steps, np.int64).reshape(-1, 2).T.copy()
        return Instructions(
            size=np.array(self.sizes, np.int64),
            is_constant=np.array(self.constants, bool),
            tensor_storage=storage,
            tensor_op=op,
            is_view=is_view.astype(bool),
            op_ticks=np.array(ticks, np.int64),
            op_work_bytes=np.array(work, np.int64),
            arg_begin=np.cumsum([0, *map(len, args)]),
            args=np.array([*itertools.chain(*args)], np.int64),
            out_begin=np.cumsum([0, *map(len, outs)]),
            outs=np.array([*itertools.chain(*outs)], np.int64),
            step_kind=kind,
            step_of=of,
            ticks_per_second=ticks_per_second,
            constants_stay=constants_stay,
        )

    def _storage(self, num_bytes: int, *, is_constant: bool = False) -> int:
        self.sizes.append(num_bytes)
        self.constants.append(is_constant)
        return len(self.sizes) - 1
