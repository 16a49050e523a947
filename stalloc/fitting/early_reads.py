"""Whether an optimizer's step cannot be made in the backward pass: because of the optimizer, or of earlier reads.

Contract: a program that reads parameters or gradients between the backward pass and the step that changes them would
see other values. All operations are watched but those of backward passes and of the steps themselves; which parameters
an optimizer holds is known from its first step on, which gradients from the step after it.
"""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stalloc.techniques.appearing import when_optimizers_are_made
from stalloc.techniques.parameters import why_not_one_by_one
from stalloc.techniques.tensor_memory import storages_of


class EarlyReads:
    """Sees whether the program reads gradients or parameters too early; made before the program begins."""

    def __init__(self) -> None:
        self._read = ""  # why, for what is read
        self._why_not: dict[int, str] = {}  # why, for each optimizer that was made; empty if it could
        self._held: set[int] = set()  # storages of parameters
        self._between: set[int] = set()  # storages that were read since the backward pass
        self._is_stepping = self._is_between = False
        when_optimizers_are_made(self._made)
        register_optimizer_step_pre_hook(self._about_to_step)
        register_optimizer_step_post_hook(self._stepped)

    @property
    def reason(self) -> str:
        """Why the step stays where it is, in words; empty if nothing was seen."""
        could = not self._why_not or not all(self._why_not.values())
        return self._read if could else next(iter(self._why_not.values()))

    def look(self, args: Any, kwargs: Any) -> None:
        """Look at an operation that was made with these arguments."""
        if torch._C._current_graph_task_id() != -1:
            self._is_between = True
        elif self._is_between and not self._is_stepping and not self._read:
            read = storages_of((args, kwargs))
            self._between |= read
            if self._held & read:
                self._read = "parameters are read between the backward pass and the optimizer's step"

    def _made(self, optimizer: Any) -> None:
        self._why_not[id(optimizer)] = why_not_one_by_one(optimizer)

    def _about_to_step(self, optimizer: Any, *_: Any) -> None:
        self._is_stepping = True
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._held |= storages_of(parameters)
        if self._between & storages_of([one.grad for one in parameters if one.grad is not None]):
            self._read = "a gradient is read or set between the backward pass and the optimizer's step"

    def _stepped(self, *_: Any) -> None:
        self._between.clear()
        self._is_stepping = self._is_between = False
