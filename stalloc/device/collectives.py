"""Collectives of torch.distributed on the virtual GPU, where NCCL moves nothing (see virtual_nccl.c).

Contract: a rank's small tensors hold after a collective what they would if every rank held what this one holds, so that
counts and sizes that ranks tell each other are plausible. Objects that are sent through GPUs are the true ones: they go
through the host, by gloo, in the same order.
"""

import ctypes
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from stalloc.device.value_reads import copier
from stalloc.device.values import Values

Maker = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What makes of a function the one in its place."""
OBJECTS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
"""Functions of torch.distributed that move objects."""


def prepare_collectives(library: ctypes.CDLL, values: Values) -> None:
    """Replace the functions of torch.distributed, which has just been imported."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    if not hasattr(c10d, "ProcessGroup"):
        return  # built without
    makers: dict[str, Maker] = _telling_sizes(c10d, library)
    makers |= {name: functools.partial(_following, c10d, values, follow) for name, follow in _FOLLOWED.items()}
    makers |= {name: functools.partial(_through_host, c10d) for name in OBJECTS}
    replace(c10d, makers)


def replace(c10d: Any, makers: dict[str, Maker]) -> None:
    """Replace functions of torch.distributed in every module of torch that has taken one over."""
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


def _each(given: dict[str, Any], num_ranks: int) -> Iterator[tuple[Any, Any]]:
    for one in given.get("tensor_list") or given.get("gather_list") or []:
        yield one, given["tensor"]


def _parts(given: dict[str, Any], num_ranks: int) -> Iterator[tuple[Any, Any]]:
    output, source = given["output_tensor"], given["input_tensor"]
    if output.is_contiguous() and output.numel() == num_ranks * source.numel():
        for one in output.view(num_ranks, *source.shape):
            yield one, source


def _own(given: dict[str, Any], num_ranks: int) -> Iterator[tuple[Any, Any]]:
    yield given["output"], given["input"]


def _sum(given: dict[str, Any], num_ranks: int) -> Iterator[tuple[Any, Any]]:
    operation = given.get("op")
    yield given["tensor"], num_ranks if operation is None or operation == type(operation).SUM else 1


def _same(given: dict[str, Any], num_ranks: int) -> Iterator[tuple[Any, Any]]:
    yield given["tensor"], 1


_FOLLOWED: dict[str, Callable[[dict[str, Any], int], Iterator[tuple[Any, Any]]]] = {
    "all_gather": _each,
    "gather": _each,
    "all_gather_into_tensor": _parts,
    "_all_gather_base": _parts,
    "all_to_all_single": _own,
    "all_reduce": _sum,
    "broadcast": _same,
    "reduce": _same,
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
                _multiply(values, there, source)
            elif source.shape == there.shape:
                copier(values, _copy_on_host)(there, source)
        return work

    return collect


def _multiply(values: Values, tensor: Any, factor: int) -> None:
    if factor != 1:
        computed = values.compute(values.torch._C.TensorBase.mul_, (tensor, factor), {})
        values.learn(tensor, None if computed is None else (tensor, computed[1]))


def _copy_on_host(there: Any, source: Any) -> Any:
    return there if there.is_cuda else there.copy_(source)


def _through_host(c10d: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that moves objects, by gloo where it would be by NCCL."""
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
