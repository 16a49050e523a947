"""Whether a program reads its parameters between the backward pass and the step of the optimizer that changes them.

Contract: who does so would see other parameters if the step were made in the backward pass. Operations are looked at,
those of the backward passes and of the steps themselves left out; what an optimizer holds is known from its first step.
"""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stalloc.techniques.tensor_memory import storages_of


class EarlyReads:
    """`reason` says so in words; empty if none was seen."""

    def __init__(self) -> None:
        self.reason = ""
        self._held: set[int] = set()  # storages of parameters
        self._is_stepping = self._is_between = False
        register_optimizer_step_pre_hook(self._about_to_step)
        register_optimizer_step_post_hook(self._stepped)

    def look(self, args: Any, kwargs: Any) -> None:
        """An operation was made of these."""
        if torch._C._current_graph_task_id() != -1:
            self._is_between = True
        elif (
            self._is_between and not self._is_stepping and not self.reason and self._held & storages_of((args, kwargs))
        ):
            self.reason = "parameters are read between the backward pass and the optimizer's step"

    def _about_to_step(self, optimizer: Any, *_: Any) -> None:
        self._is_stepping = True
        self._held |= storages_of([one for group in optimizer.param_groups for one in group["params"]])

    def _stepped(self, *_: Any) -> None:
        self._is_stepping = self._is_between = False
