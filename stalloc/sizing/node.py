"""Every byte of a node: what each rank takes of its GPU and of the host, and what the machine has to have.

Contract: what was counted is exact (allocated, reserved, pinned, registered); what was looked at while the program ran
is of this machine (its own memory, /dev/shm); what is not there in a dry run (the CUDA context, NCCL) is a `Span` from
what sources say. docs/node.md says where each figure comes from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stalloc.device import KNOWN_GPUS, VirtualGPU
from stalloc.device.context import Context, context_of
from stalloc.sizing.nccl_memory import NONE, Communicator, NcclMemory, Span, links_of, nccl_memory


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    used: Communicator
    memory: NcclMemory

    def as_json(self) -> dict[str, Any]:
        channels = self.memory.channels
        return {
            "num_ranks": self.used.num_ranks,
            "num_local": self.used.num_local,
            "num_nodes": self.used.num_nodes,
            "collectives": sorted(self.used.collectives),
            "channels": _pair(channels.collective),
            "p2p_channels": _pair(channels.p2p),
            "p2p_channels_each_peer": _pair(channels.p2p_each_peer),
            "nvls_channels": channels.nvls,
            "parts": {name: _pair(span) for name, span in self.memory.parts.items()},
            **_pairs(self.memory, "device_bytes", "pinned_bytes", "shared_memory_bytes"),
        }


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    rank: int | None
    allocated_bytes: int  #: allocated peak on the GPU that takes most, as are the next figures
    reserved_bytes: int
    outside_bytes: int
    """What the driver gave beyond the reserved memory: to libraries, and to the program past PyTorch."""
    context: Context
    groups: list[GroupMemory]
    host: dict[str, Any]  #: figures of host memory, as `host_use` gives them
    outside_nccl: list[str]

    @property
    def nccl(self) -> Span:
        """NCCL's memory on the GPU, over all communicators."""
        return sum((group.memory.device for group in self.groups), NONE)

    @property
    def nccl_pinned(self) -> Span:
        return sum((group.memory.pinned for group in self.groups), NONE)

    @property
    def shared_memory(self) -> Span:
        """Bytes below /dev/shm, NCCL's part included."""
        seen = self.host["shared_memory_bytes"]
        return sum((group.memory.shared_memory for group in self.groups), Span(least=seen, most=seen))

    @property
    def nvidia_smi(self) -> Span:
        driver = self.reserved_bytes + self.outside_bytes
        context = Span(least=self.context.least_bytes, most=self.context.most_bytes)
        return Span(least=driver, most=driver) + context + self.nccl

    def as_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "outside_allocator_bytes": self.outside_bytes,
            "context_bytes": [self.context.least_bytes, self.context.most_bytes],
            "context_source": self.context.source,
            **_pairs(self, "nccl_bytes", "nvidia_smi_bytes", "nccl_pinned_bytes", "shared_memory_bytes"),
            "communicators": [group.as_json() for group in self.groups],
            "host": self.host,
            "outside_nccl": self.outside_nccl,
        }


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """The ranks that were tried, and the machine with all of its ranks."""

    ranks: list[RankMemory]
    num_local: int  #: the number of ranks on one machine
    files_bytes: int = 0  #: bytes of files written by the program, which a container counts until they are on the disk
    tried_here: list[RankMemory] = field(default_factory=list)
    """The tried ranks of the machine on which most were tried."""

    def _of_machine(self, spans: Sequence[Span]) -> Span:
        """The sum over all ranks of the machine; a rank that was not tried counts like the largest one that was."""
        missing = self.num_local - len(spans)
        largest = max(spans, key=lambda span: (span.most, span.least))
        return sum(spans, Span(least=missing * largest.least, most=missing * largest.most))

    def host(self, name: str) -> int:
        """One figure of the host for all ranks of the machine."""
        return self._of_machine([Span(least=one.host[name], most=one.host[name]) for one in self.tried_here]).most

    @property
    def pinned(self) -> Span:
        """Bytes of pinned host memory of all ranks of the machine, NCCL's proxies included."""
        found = ((one.host["pinned_bytes"], one.nccl_pinned) for one in self.tried_here)
        return self._of_machine([Span(least=own, most=own) + proxies for own, proxies in found])

    @property
    def shared_memory(self) -> Span:
        """Bytes of shared memory of all ranks of the machine."""
        return self._of_machine([one.shared_memory for one in self.tried_here])

    @property
    def cgroup(self) -> Span:
        """What the machine's ranks add to the memory of their container. At the most with pinned memory and libraries:
        whether the driver has pages charged to it is not known here."""
        own, loaded, shared = self.host("own_bytes"), self.host("resident_before_bytes"), self.shared_memory
        return Span(least=own + shared.least, most=own + loaded + shared.most + self.pinned.most + self.files_bytes)

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks": [one.as_json() for one in self.ranks],
            "machine": {
                "num_ranks": self.num_local,
                "num_tried": len(self.tried_here),
                "registered_bytes": self.host("registered_bytes"),
                "own_bytes": self.host("own_bytes"),
                "files_bytes": self.files_bytes,
                **_pairs(self, "pinned_bytes", "shared_memory_bytes", "cgroup_bytes"),
            },
        }


def node_memory(
    gpu: VirtualGPU,
    seen: Mapping[int | None, tuple[Sequence[Mapping[str, int]], Mapping[str, Any]]],
    *,
    num_local: int = 1,
    files_bytes: int = 0,
) -> NodeMemory:
    """The memory of a node, from what was seen of each rank: its devices, and what its process told."""
    card = next((key for key, known in KNOWN_GPUS.items() if known.name == gpu.name), "")
    links = links_of(card, gpu.compute_capability)
    machines: dict[int, list[RankMemory]] = {}
    ranks = []
    for rank, (devices, process) in seen.items():
        nothing = {"device": 0, "allocated_peak_bytes": 0, "reserved_peak_bytes": 0}
        largest = max(devices, key=lambda one: one["reserved_peak_bytes"], default=nothing)
        reserved, peaks = largest["reserved_peak_bytes"], process["driver_peak_bytes"]
        driver = peaks[largest["device"]] if largest["device"] < len(peaks) else 0
        used = (_communicator(told, num_local) for told in process["communicators"])
        settings = process["nccl_settings"]
        one = RankMemory(
            rank=rank,
            allocated_bytes=largest["allocated_peak_bytes"],
            reserved_bytes=reserved,
            outside_bytes=max(0, driver - reserved),
            context=context_of(card),
            groups=[
                GroupMemory(used=one, memory=nccl_memory(links, one, settings=settings)) for one in used if one.is_used
            ],
            host=dict(process["host"]),
            outside_nccl=list(process["outside_nccl"]),
        )
        ranks.append(one)
        machines.setdefault((rank or 0) // num_local, []).append(one)
    most = max(machines.values(), key=len)
    return NodeMemory(ranks=ranks, num_local=num_local, files_bytes=files_bytes, tried_here=most)


def _communicator(told: Mapping[str, Any], per_node: int) -> Communicator:
    """Where a communicator's ranks are; if its group is gone, its ranks are taken to be consecutive."""
    num, own, ranks = told["num_ranks"], told["rank"], told["ranks"]
    if ranks is None or len(ranks) != num:
        ranks = list(range(num))
    nodes = [rank // per_node for rank in ranks]
    here = nodes[own] if own < num else 0
    local = [at for at in range(num) if nodes[at] == here]

    def count(peers: Sequence[int], *, are_local: bool) -> int:
        return sum(1 for peer in peers if peer < num and (nodes[peer] == here) == are_local)

    to, source = told["sends_to"], told["receives_from"]
    return Communicator(
        num_ranks=num,
        rank=own,
        num_local=len(local),
        local_index=local.index(own) if own in local else 0,
        num_nodes=len(set(nodes)),
        collectives=tuple(told["most_bytes"]),
        num_local_peers=(count(to, are_local=True), count(source, are_local=True)),
        num_remote_peers=(count(to, are_local=False), count(source, are_local=False)),
    )


def _pair(span: Span) -> list[int]:
    return [span.least, span.most]


def _pairs(of: object, *names: str) -> dict[str, list[int]]:
    return {name: _pair(getattr(of, name.removesuffix("_bytes"))) for name in names}
