"""One rank of a distributed program in a process of its own, among others that are not there.

Contract: after `be_rank` a process group has PyTorch's own NCCL for GPUs, over the virtual GPU's library that moves
nothing, and a stand-in for the host, whatever backends it names: collectives return at once, and tensors that others
would fill hold what they would if every rank held what this one holds. So do objects, but those that only another rank
makes are not there. Requests of memory are those of that rank, except what NCCL takes outside the allocator.
"""

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from stalloc.device.collectives import Maker, replace
from stalloc.device.virtual import communicators
from stalloc.errors import MissingRankError
from stalloc.imports import after_import

RANKS_A_NODE = 8  #: GPUs of a machine, at the most
_ABSENT = "absent"  # the backend for tensors of the host
_SENT = {"broadcast_object_list": 0, "scatter_object_list": 0, "recv_object_list": -1}
"""Functions that hand on one rank's objects, and which rank's if the program names none."""
_STAND_INS = {"gloo", "mpi", "ucc"}  # backends that need the other ranks


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the processes that torchrun would start."""

    number: int
    num_ranks: int

    @property
    def num_local(self) -> int:
        return min(self.num_ranks, RANKS_A_NODE)

    def variables(self) -> dict[str, str]:
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
    """Make the process groups of this process those of one rank; environment variables say which."""
    after_import("torch.distributed.distributed_c10d", _replace)
    after_import("torch.distributed.checkpoint.utils", _save_alone)
    after_import("torch.distributed.optim.zero_redundancy_optimizer", _consolidate_alone)


def _save_alone() -> None:
    """Let this rank alone plan distributed checkpoints, for the tensors that it has."""
    wrapper: Any = sys.modules["torch.distributed.checkpoint.utils"]._DistWrapper
    init = wrapper.__init__

    @functools.wraps(init)
    def init_alone(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        self.use_dist, self.is_coordinator = False, True

    wrapper.__init__ = init_alone


def _consolidate_alone() -> None:
    """Let an optimizer that is divided among ranks use its own part as that of every rank."""
    module: Any = sys.modules["torch.distributed.optim.zero_redundancy_optimizer"]
    consolidate, send = module.ZeroRedundancyOptimizer.consolidate_state_dict, module._broadcast_object

    @functools.wraps(consolidate)
    def consolidate_state_dict(self: Any, *args: Any, **named: Any) -> None:
        def send_own(*_: Any, group: Any, device: Any, **__: Any) -> Any:
            return send(self.optim.state_dict(), _own_rank(), group=group, device=device)

        with _replaced(module, "_broadcast_object", send_own):
            consolidate(self, *args, **named)

    module.ZeroRedundancyOptimizer.consolidate_state_dict = consolidate_state_dict


@contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    own = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, own)


def _replace() -> None:
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    if not hasattr(c10d, "ProcessGroup"):
        return  # built without
    does = {
        "init_process_group": _init_process_group,
        "split_group": _split_group,
        "_new_process_group_helper": _new_process_group,
        "all_gather_object": _gather,
        "gather_object": _gather,
        **dict.fromkeys(_SENT, _receive),
    }
    makers: dict[str, Maker] = {name: functools.partial(_bound, c10d, do) for name, do in does.items()}
    makers |= {
        "_store_based_barrier": lambda _: lambda *_, **__: None,
        "monitored_barrier": lambda function: functools.wraps(function)(lambda *_, **__: None),
        "send_object_list": inspect.unwrap,
    }
    replace(c10d, makers)


def _bound(c10d: Any, does: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that hands its bound arguments to `does`, after the module and the function in whose place it is."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        return does(c10d, function, signature.bind(*args, **named))

    return called


def _init_process_group(c10d: Any, init: Callable[..., Any], bound: inspect.BoundArguments) -> None:
    bound.arguments.pop("init_method", None)
    _register_absent(c10d)
    own = {"rank": _own_rank(), "world_size": int(os.environ["WORLD_SIZE"]), "store": _store_without_others(c10d)}
    init(**bound.arguments | own)


def _new_process_group(c10d: Any, function: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    given = bound.arguments
    backend, ranks = given["backend"], given["global_ranks_in_group"] or range(given["group_size"])
    backends = dict(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map())
    communicators().note_group(str(given["group_name"]), ranks, backends.get("cuda", "nccl"))
    if _STAND_INS & set(backends.values()):
        given["backend"] = f"cpu:{_ABSENT},cuda:nccl"
    made = function(*bound.args, **bound.kwargs)
    if made[0] in c10d._world.pg_map:  # it goes by the name that the program gave it
        c10d._world.pg_map[made[0]] = (c10d.Backend(str(backend)), made[1])
    return made


def _split_group(c10d: Any, _: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    parent = bound.arguments.get("parent_pg") or c10d.group.WORLD
    own = [ranks for ranks in bound.arguments["split_ranks"] if c10d.get_rank(parent) in ranks]
    return c10d.new_group([c10d.get_global_rank(parent, one) for one in sorted(own[0])]) if own else None


def _own_rank() -> int:
    return int(os.environ["RANK"])


@functools.cache
def _store_without_others(c10d: Any) -> Any:
    """A store that answers zeros, as many bytes as NCCL's identifiers have, for whatever another rank would write."""

    class Store(c10d.Store):
        def __init__(self) -> None:
            super().__init__()
            self._held: dict[str, bytes] = {}

        def set(self, key: str, value: bytes) -> None:
            _note_group(key)
            self._held[key] = value

        def get(self, key: str) -> bytes:
            _note_group(key)
            return self._held.get(key, bytes(128))

        def add(self, key: str, value: int) -> int:
            total = int(self._held.get(key, b"0")) + value
            self._held[key] = str(total).encode()
            return total

        def compare_set(self, key: str, _: bytes, value: bytes) -> bytes:
            return self._held.setdefault(key, value)

        def check(self, keys: list[str]) -> bool:
            return all(key in self._held for key in keys)

        def wait(self, *_: Any) -> None:
            pass

        def delete_key(self, key: str) -> bool:
            return self._held.pop(key, None) is not None

        def num_keys(self) -> int:
            return len(self._held)

        def clone(self) -> "Store":
            return self

    return Store()


def _note_group(key: str) -> None:
    """Note the group of the next communicator, whose identifier is stored under "GROUP//cuda//NUMBER"."""
    if (words := key.split("//"))[-2:-1] == ["cuda"] and len(words) > 2:
        communicators().next_is_of(words[-3])


def _register_absent(c10d: Any) -> None:
    """Register the backend for host tensors: PyTorch's fake one, which for DDP has to return what it reduced too."""
    import torch
    from torch._C._distributed_c10d import FakeProcessGroup

    if _ABSENT in c10d.Backend.backend_list:
        return

    def create(options: Any, _: Any) -> Any:
        return FakeProcessGroup._create_internal(options.group_rank, options.group_size)

    c10d.Backend.register_backend(_ABSENT, create, extended_api=True, devices=["cpu"])
    if hasattr(c10d.Work, "boxed"):
        library = c10d._stalloc_library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings(action="ignore"):  # that it stands in the place of another
            library.impl("allreduce_", _reduced, "CPU", allow_override=True)


def _reduced(tensors: list[Any], *_: Any) -> tuple[list[Any], Any]:
    """The result that DDP asks for its buckets on the host, and that PyTorch's fake group does not give."""
    import torch

    future: Any = torch.futures.Future()
    future.set_result(tensors)
    return tensors, torch._C._distributed_c10d._create_work_from_future(future).boxed()


def _receive(c10d: Any, function: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    """Receive objects; if only another rank makes them, it raises an error of one sentence."""
    given, name = bound.arguments, function.__name__
    source, in_group = given.get("src"), given.get("group_src")
    group = given.get("group") or c10d.group.WORLD
    if source is None and in_group is not None:
        source = c10d.get_global_rank(group, in_group)
    source, rank = _SENT[name] if source is None else source, _own_rank()
    own: Any = given.get("scatter_object_input_list") or given.get("object_list") or []
    if source == rank:
        objects = [own[c10d.get_rank(group)]] if name == "scatter_object_list" else list(own)
        with _answering(c10d, objects):
            return inspect.unwrap(function)(*bound.args, **bound.kwargs)
    if all(one is None for one in own):
        whom = f"rank {source}" if source >= 0 else "another rank"
        raise MissingRankError(
            f"rank {rank} waits in {name} for objects of {whom}, which is not there in a dry run: let every rank "
            "make them itself where STALLOC_DRYRUN is set."
        )
    if name == "scatter_object_list":
        given["scatter_object_output_list"][0] = own[c10d.get_rank(group)]
    return None if name != "recv_object_list" else max(source, 0)


def _gather(c10d: Any, function: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    """Gather an object of each rank: copies of this rank's own."""
    objects = [bound.arguments["obj"]] * c10d.get_world_size(bound.arguments.get("group"))
    with _answering(c10d, objects):
        return inspect.unwrap(function)(*bound.args, **bound.kwargs)


def _answering(c10d: Any, objects: list[Any]) -> AbstractContextManager[None]:
    """A block in which received tensors are read, one after the other, as copies of these objects."""
    import torch

    read, left = c10d._tensor_to_object, iter(objects)

    def answer(tensor: Any, _: Any, *more: Any) -> Any:
        tensor.cpu()  # as it would be read
        return read(*c10d._object_to_tensor(next(left), torch.device("cpu"), *more), *more)

    return _replaced(c10d, "_tensor_to_object", answer)
