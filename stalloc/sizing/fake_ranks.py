"""One rank of a distributed program in a process of its own, among others that are not there.

Contract: after `be_rank` the process groups that the program makes, whatever backend it names, are PyTorch's fake ones:
collectives return at once, tensors that others would fill keep what they hold, and objects that others would send are
not there. Requests of memory are those of that rank, except what NCCL takes outside the allocator.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stalloc.errors import MissingRankError
from stalloc.imports import after_import

RANKS_A_NODE = 8  #: GPUs of a machine, at the most


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the processes that torchrun would start."""

    number: int
    num_ranks: int

    @property
    def num_local(self) -> int:
        """Processes, and GPUs, of a machine."""
        return min(self.num_ranks, RANKS_A_NODE)

    def variables(self) -> dict[str, str]:
        """What torchrun tells it."""
        local, node = self.number % self.num_local, self.number // self.num_local
        return {
            "RANK": str(self.number),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.num_local),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(-(-self.num_ranks // self.num_local)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "stalloc",
            "STALLOC_DRYRUN": "1",
        }


def be_rank() -> None:
    """Make the process groups of this process fake; which rank it is say the variables."""
    after_import("torch.distributed.distributed_c10d", _replace)


def _replace() -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (it registers the backend)

    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    dist: Any = sys.modules["torch.distributed"]
    init, helper = c10d.init_process_group, c10d._new_process_group_helper

    @functools.wraps(init)
    def init_process_group(*_: Any, **__: Any) -> None:
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        init("fake", rank=rank, world_size=num_ranks, store=dist.HashStore())

    @functools.wraps(helper)
    def new_process_group_helper(*args: Any, **named: Any) -> Any:
        if len(args) > _BACKEND:
            args = (*args[:_BACKEND], "fake", *args[_BACKEND + 1 :])
        else:
            named["backend"] = "fake"
        return helper(*args, **named)

    c10d._new_process_group_helper = new_process_group_helper
    _everywhere("init_process_group", init, init_process_group)
    for name, usual in (("broadcast_object_list", 0), ("scatter_object_list", 0), ("recv_object_list", -1)):
        function = getattr(c10d, name, None)
        if function is not None:
            _everywhere(name, function, _receiving(c10d, function, usual))


def _receiving(c10d: Any, function: Callable[..., Any], usual_source: int) -> Callable[..., Any]:
    """A function that receives objects; where it is not from this rank itself, one sentence says that it cannot."""
    name, signature = function.__name__, inspect.signature(function)

    @functools.wraps(function)
    def receive(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        source, in_group = given.get("src"), given.get("group_src")
        if source is None and in_group is not None:
            source = c10d.get_global_rank(given.get("group") or c10d.group.WORLD, in_group)
        source, rank = usual_source if source is None else source, int(os.environ["RANK"])
        if source != rank:
            whom = f"rank {source}" if source >= 0 else "another rank"
            raise MissingRankError(
                f"rank {rank} waits in {name} for objects of {whom}, which is not there in a dry run: let every rank "
                "make them itself where STALLOC_DRYRUN is set."
            )
        return function(*args, **named)

    return receive


_BACKEND = 3  # the position of an argument


def _everywhere(name: str, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Replace a function of torch.distributed in every module that has taken it over."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch.") and module.__dict__.get(name) is before:
            setattr(module, name, after)
