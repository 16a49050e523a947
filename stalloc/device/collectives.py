"""Collectives of torch.distributed on the virtual GPU, where NCCL moves nothing (virtual_nccl.c), and communicators.

Contract: a rank's small tensors hold after a collective what they would if every rank held what this one holds, so that
counts and sizes that ranks tell each other are plausible. Objects that are sent through GPUs are the true ones: they go
through the host, by gloo, in the same order. Which communicators a program made, and what it used each for, is noted.
"""

import ctypes
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.device.followed import copier
from stalloc.device.values import Values

Maker = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What makes of a function the one in its place."""
_OBJECTS = (  # functions of torch.distributed that move objects
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


def prepare_collectives(library: ctypes.CDLL, values: Values) -> None:
    """Replace the functions of torch.distributed, which has just been imported."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    if not hasattr(c10d, "ProcessGroup"):
        return  # built without
    makers: dict[str, Maker] = _telling_sizes(c10d, library)
    makers |= {name: functools.partial(_following, c10d, values, follow) for name, follow in _FOLLOWED.items()}
    makers |= {name: functools.partial(_through_host, c10d) for name in _OBJECTS}
    replace(c10d, makers)


def replace(c10d: Any, makers: dict[str, Maker]) -> None:
    before = {name: function for name in makers if (function := getattr(c10d, name, None)) is not None}
    after = {name: makers[name](function) for name, function in before.items()}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch."):
            names = vars(module)
            for name in before.keys() & names.keys():
                if names[name] is before[name]:
                    setattr(module, name, after[name])


def _telling_sizes(c10d: Any, library: ctypes.CDLL) -> dict[str, Maker]:
    """What lets NCCL know how large a group is that is split off another."""

    def helper(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def new_process_group_helper(group_size: int, *args: Any, **named: Any) -> Any:
            library.stalloc_virtual_split_size(group_size)
            return function(group_size, *args, **named)

        return new_process_group_helper

    def splitter(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def split_group(*args: Any, **named: Any) -> Any:
            given = inspect.signature(function).bind(*args, **named).arguments
            own = c10d.get_rank(given.get("parent_pg"))
            sizes = [len(ranks) for ranks in given.get("split_ranks") or [] if own in ranks]
            library.stalloc_virtual_split_size(sizes[0] if sizes else 1)
            return function(*args, **named)

        return split_group

    return {"_new_process_group_helper": helper, "split_group": splitter}


def _into_list(given: dict[str, Any], num_ranks: int) -> list[tuple[Any, Any]]:
    return [(one, given["tensor"]) for one in given.get("tensor_list") or given.get("gather_list") or []]


def _into_parts(given: dict[str, Any], num_ranks: int) -> list[tuple[Any, Any]]:
    output, source = given["output_tensor"], given["input_tensor"]
    if not output.is_contiguous() or output.numel() != num_ranks * source.numel():
        return []
    return [(one, source) for one in output.view(num_ranks, *source.shape)]


def _summed(given: dict[str, Any], num_ranks: int) -> list[tuple[Any, Any]]:
    operation = given.get("op")
    return [(given["tensor"], num_ranks if operation is None or operation == type(operation).SUM else 1)]


_FOLLOWED: dict[str, Callable[[dict[str, Any], int], list[tuple[Any, Any]]]] = {
    **dict.fromkeys(("all_gather", "gather"), _into_list),
    **dict.fromkeys(("all_gather_into_tensor", "_all_gather_base"), _into_parts),
    **dict.fromkeys(("broadcast", "reduce"), lambda given, _: [(given["tensor"], 1)]),
    "all_to_all_single": lambda given, _: [(given["output"], given["input"])],
    "all_reduce": _summed,
}
"""By collective, a function of its arguments that gives each tensor that is written, and what it then holds: another
tensor, or a multiple of itself."""


def _following(
    c10d: Any, values: Values, written: Callable[..., Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def collect(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        pairs = [pair for pair in written(given, c10d.get_world_size(given.get("group"))) if values.is_known(pair[0])]
        work = function(*args, **named)
        for there, source in pairs:
            values.same_version(there)
            if isinstance(source, int):
                if source != 1:
                    computed = values.compute(values.base.mul_, (there, source), {})
                    values.learn(there, None if computed is None else (there, computed[1]))
            elif source.shape == there.shape:
                copier(values, "copy_", lambda to, it: to if to.is_cuda else to.copy_(it))(there, source)
        return work

    return collect


def _through_host(c10d: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    twins: dict[Any, Any] = c10d.__dict__.setdefault("_stalloc_twins", {})

    @functools.wraps(function)
    def move(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)
        group = given.arguments.get("group") or c10d._get_default_group()
        if group is c10d.GroupMember.NON_GROUP_MEMBER or str(c10d._get_object_coll_device(group)) == "cpu":
            return function(*args, **named)
        if twins.get(group) not in c10d._world.pg_map:
            ranks = c10d.get_process_group_ranks(group)
            twins[group] = c10d.new_group(ranks, backend="gloo", use_local_synchronization=True)
        given.arguments.update(group=twins[group], device=None)
        if "device" not in signature.parameters:
            del given.arguments["device"]
        return function(*given.args, **given.kwargs)

    return move


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")  # as virtual_nccl.c numbers them
_MOST_NOTED, _MOST_PEERS = 1024, 1024


class _Noted(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rank", "num_ranks", "device", "group", "parent", "reserved")),
        *((name, ctypes.c_uint64 * len(_KINDS)) for name in ("num_calls", "most_bytes")),
        *((name, ctypes.c_uint8 * _MOST_PEERS) for name in ("sends_to", "receives_from")),
    ]


@dataclass(frozen=True, kw_only=True)
class SeenCommunicator:
    rank: int
    num_ranks: int
    device: int
    group: str | None  #: the name of its process group, where a rank of a dry run made it
    most_bytes: dict[str, int]  #: the largest call of each kind of collective that there was
    sends_to: tuple[int, ...]  #: ranks of the communicator other than this one
    receives_from: tuple[int, ...]


class Communicators:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._groups: list[str] = []
        self.ranks: dict[str, list[int]] = {}  #: of each process group that was noted, in their order there
        self.backends: dict[str, str] = {}  #: that each process group uses for GPUs: "nccl", "gloo"

    def note_group(self, group: str, ranks: Sequence[int], backend: str) -> None:
        """Remember a process group, which may be gone when the program ends."""
        self.ranks[group] = list(ranks)
        self.backends[group] = backend

    def next_is_of(self, group: str) -> None:
        """Say which process group the next ones belong to."""
        if group not in self._groups:
            self._groups.append(group)
        self._library.stalloc_virtual_group(self._groups.index(group))

    def seen(self) -> list[SeenCommunicator]:
        pointers = (ctypes.POINTER(_Noted) * _MOST_NOTED)()
        num = self._library.stalloc_virtual_communicators(pointers, _MOST_NOTED)
        return [
            SeenCommunicator(
                rank=noted.rank,
                num_ranks=noted.num_ranks,
                device=noted.device,
                group=self._groups[noted.group] if noted.group >= 0 else None,
                most_bytes={_KINDS[i]: noted.most_bytes[i] for i in range(len(_KINDS)) if noted.num_calls[i]},
                sends_to=tuple(np.flatnonzero(noted.sends_to).tolist()),
                receives_from=tuple(np.flatnonzero(noted.receives_from).tolist()),
            )
            for noted in (pointer.contents for pointer in pointers[:num])
        ]
