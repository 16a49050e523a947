"""What NCCL allocates for a communicator outside of PyTorch's allocator, from the mechanism in its source.

Contract: bytes of one rank, each part as a `Span`; both ends are the same where the source and the links of the machine
decide alone. The formulas are those of NCCL 2.28.9 (src/transport/p2p.cc, net.cc, shm.cc and nvls.cc, src/init.cc), and
for NVLink SHARP also those before 2.22. Not counted: NCCL's kernels, which are part of the CUDA context, its tables of
a few MiB, and CollNet (SHARP of InfiniBand switches).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from stalloc.sizes import MIB
from stalloc.sizing.nccl_channels import Channels, Links, Span, channels_of, number

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
Version = tuple[int, int, int]

NONE = Span(least=0, most=0)
_PAGES = 2 * MIB  # what buffers that other processes map are rounded to
_HEAD = 4096  # ncclSendMem and ncclRecvMem
_LL, _LL128, _SIMPLE = 524_288, 4_915_200, 4 * MIB  # buffers of a connection, by protocol
_STEPS, _SHARED_STEPS = 8, 16
_SPLIT_NVLS = _LAZY = (2, 22, 0)  # since when: NVLS by chunks, connections at the first use
_BY_SWITCH = ("all_reduce", "all_gather", "reduce_scatter")
_NET_PEERS = 2  # of a double binary tree: three for half of the channels, one for the others


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """A communicator, and what one of its ranks does with it."""

    num_ranks: int
    rank: int = 0
    num_local: int
    """The number of its ranks on this machine."""
    local_index: int = 0
    """Which of the ranks on this machine this one is, in the order of ranks."""
    num_nodes: int = 1
    collectives: Collection[Collective] = ()
    num_local_peers: tuple[int, int] = (0, 0)
    """Other ranks on this machine that it sends to, and receives from."""
    num_remote_peers: tuple[int, int] = (0, 0)
    """Ranks on other machines that it sends to, and receives from."""

    @property
    def is_used(self) -> bool:
        """Whether NCCL makes it at all: PyTorch does at the first call."""
        return bool(self.collectives) or any(self.num_local_peers) or any(self.num_remote_peers)


@dataclass(frozen=True, kw_only=True)
class NcclMemory:
    """Bytes of one rank for one communicator."""

    channels: Channels
    parts: dict[str, Span] = field(default_factory=dict)
    """On the device: ring, tree, switch, sends, network."""
    pinned: Span = NONE
    """Pinned host memory of the proxies that talk to network cards."""
    shared_memory: Span = NONE
    """Below /dev/shm, where GPUs do not reach each other; pinned where NCCL makes it with cuMem."""

    @property
    def device(self) -> Span:
        """All bytes on the device."""
        return sum(self.parts.values(), NONE)


def nccl_memory(
    links: Links,
    used: Communicator,
    *,
    settings: Mapping[str, str] | None = None,
    version: Version = (2, 28, 9),
    channels: Channels | None = None,
) -> NcclMemory:
    """What NCCL takes for a communicator.

    settings: its environment variables (NCCL_BUFFSIZE and others: docs/node.md lists them). channels: where they are
    known, as from the log of a run ("24 coll channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer").
    """
    settings = settings or {}
    found = channels or channels_of(
        links,
        num_local=used.num_local,
        num_nodes=used.num_nodes,
        num_ranks=used.num_ranks,
        settings=settings,
        version=version,
    )
    if not used.is_used:
        return NcclMemory(channels=found)
    return _Model(links, used, settings, version, found).memory()


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _PAGES) * _PAGES


@dataclass(frozen=True)
class _Buffers:
    """Bytes of one connection's ends on the device."""

    receives: int
    sends: int
    net: int
    """Either end at a network card that reaches the device's memory."""
    host: int
    """Either end at one that does not; also what processes share where GPUs do not reach each other."""
    host_least: int
    """What an end whose large buffers are on the device has on the host."""

    @property
    def both(self) -> int:
        return self.receives + self.sends


def _buffers(links: Links, settings: Mapping[str, str]) -> _Buffers:
    simple = number(settings, "NCCL_BUFFSIZE", default=_SIMPLE)
    low = number(settings, "NCCL_LL_BUFFSIZE", default=_LL)
    low128 = number(settings, "NCCL_LL128_BUFFSIZE", default=_LL128)
    reads = links.capability == 80 and links.num_nvlinks > 0  # then the sender keeps the large buffer
    if number(settings, "NCCL_P2P_READ_ENABLE", default=int(reads)):
        receives, sends = _HEAD + low + low128, _HEAD + simple
    else:
        receives, sends = _HEAD + low + low128 + simple, _HEAD
    return _Buffers(
        receives=_rounded(receives),
        sends=_rounded(sends),
        net=_rounded(low128 + simple),
        host=low + low128 + simple + 2 * _HEAD,
        host_least=low + 2 * _HEAD,
    )


class _Model:
    """The parts of one communicator."""

    def __init__(
        self, links: Links, used: Communicator, settings: Mapping[str, str], version: Version, channels: Channels
    ) -> None:
        self._links, self._used, self._settings = links, used, settings
        self._version, self._channels = version, channels
        self._buffers = _buffers(links, settings)
        self._peer_to_peer = _reaches_peers(links, settings)
        self._is_eager = _is_eager(settings, version)

    def memory(self) -> NcclMemory:
        """All parts."""
        parts = {
            "ring": self._ring(),
            "tree": self._tree(),
            "switch": self._switch(),
            "sends": self._sends(),
            "network": self._shared_by_peers(),
        }
        return NcclMemory(
            channels=self._channels,
            parts={name: span for name, span in parts.items() if span.most},
            pinned=self._proxies(),
            shared_memory=self._between_processes(),
        )

    def _uses(self, algorithm: str, collectives: Collection[str]) -> bool:
        """Whether calls that were made may choose an algorithm."""
        return bool(set(collectives) & set(self._used.collectives)) and _allows(self._settings, algorithm)

    def _span(self, num: Span, least_bytes: int, most_bytes: int) -> Span:
        return Span(least=num.least * least_bytes, most=num.most * most_bytes)

    def _within(self, num: Span, size_bytes: int) -> Span:
        """Bytes of `num` connections within the machine; none are on the device if its GPUs do not reach each other."""
        least = 0 if self._peer_to_peer is not True else size_bytes
        most = 0 if self._peer_to_peer is False else size_bytes
        return self._span(num, least, most)

    def _at_network(self) -> Span:
        """Channels whose ring enters or leaves the machine at this rank, for each direction."""
        num, local = self._channels.collective, self._used.num_local
        if self._used.num_nodes == 1:
            return NONE
        return num if local == 1 else Span(least=0, most=min(num.most, -(-2 * num.most // local)))

    def _ring(self) -> Span:
        used = self._used
        if used.num_ranks < 2 or not (used.collectives or self._is_eager is True):
            return NONE
        net = self._at_network()
        if used.num_nodes > 1 and used.num_local == 1:
            return Span(least=0, most=2 * net.most * self._buffers.net)  # none where cards do not reach the device
        found = self._within(self._channels.collective, self._buffers.both)
        more = net.most * max(0, 2 * self._buffers.net - self._buffers.both)
        return Span(least=found.least, most=found.most + more) if net.most else self._or_lazily(found, "ring")

    def _or_lazily(self, found: Span, part: str) -> Span:
        """A part that is made at its first use, if calls may or may not use it."""
        certain = self._is_eager is True or (part == "ring" and bool(self._used.collectives))
        return found if certain else Span(least=0, most=found.most)

    def _tree(self) -> Span:
        used = self._used
        if used.num_ranks < 3 and used.num_nodes == 1:
            return NONE  # the other rank is the ring's neighbour in both directions
        if self._is_eager is not True and not self._uses("tree", ("all_reduce",)):
            return NONE
        is_first, is_last = used.local_index == 0, used.local_index == used.num_local - 1
        # within a machine the tree is a chain: its ends have one neighbour, with whom the ring has one direction
        size = self._buffers.receives if is_first else self._buffers.sends if is_last else self._buffers.both
        found = self._within(self._channels.collective, size) if used.num_local > 1 else NONE
        net = self._at_network()
        found += Span(least=0, most=2 * _NET_PEERS * net.most * self._buffers.net)
        return self._or_lazily(found, "tree") if used.num_nodes == 1 else Span(least=0, most=found.most)

    def _switch(self) -> Span:
        """NVLink SHARP: every rank keeps a part for each of those that lead a part of the data (nvls.cc)."""
        num, heads = self._channels.nvls, self._used.num_local
        if not num or (self._is_eager is not True and not self._uses("nvls", _BY_SWITCH)):
            return NONE
        if self._version < _SPLIT_NVLS:
            num = self._channels.collective.most
            buffer = number(self._settings, "NCCL_BUFFSIZE", default=_SIMPLE) + _PAGES
        else:
            buffer = number(self._settings, "NCCL_NVLS_CHUNKSIZE", default=128 << 10) * _STEPS
        size = _rounded(num * 2 * buffer * heads)
        found = self._or_lazily(Span(least=size, most=size), "switch")
        if self._used.num_nodes > 1:  # a tree between the machines, for each channel
            peers = 1 if self._used.num_nodes == 2 else _NET_PEERS
            found += Span(least=0, most=2 * peers * num * self._buffers.net)
        return found

    def _sends(self) -> Span:
        """Buffers for each other rank on the machine that send and receive were first used with."""
        to, source = self._used.num_local_peers
        size = to * self._buffers.sends + source * self._buffers.receives
        return self._within(self._channels.p2p_each_peer, size)

    def _shared_by_peers(self) -> Span:
        """The buffers that all peers behind network cards share; made at once where connections are (init.cc)."""
        used = self._used
        if used.num_nodes > 1:
            chunk = number(self._settings, "NCCL_P2P_NET_CHUNKSIZE", default=128 << 10)
        elif used.num_ranks == 1 or self._links.kind == "nvswitch":
            chunk = number(self._settings, "NCCL_P2P_NVL_CHUNKSIZE", default=512 << 10)
        else:
            chunk = number(self._settings, "NCCL_P2P_PCI_CHUNKSIZE", default=128 << 10)
        size = _SHARED_STEPS * chunk
        is_certain = self._is_eager is True or any(used.num_remote_peers)
        is_needed = is_certain or self._is_eager is None
        least = size if is_certain else 0
        return self._span(self._channels.p2p, least, size if is_needed else 0)

    def _proxies(self) -> Span:
        """Pinned memory of connections through network cards; large buffers are there if cards see the host only."""
        if self._used.num_nodes == 1 or not self._used.collectives:
            return NONE
        net = self._at_network()
        trees = _NET_PEERS if self._uses("tree", ("all_reduce",)) else 0
        return Span(
            least=2 * net.least * self._buffers.host_least, most=2 * (1 + trees) * net.most * self._buffers.host
        )

    def _between_processes(self) -> Span:
        """What GPUs that do not reach each other exchange through: the receiver keeps the buffers (shm.cc)."""
        used = self._used
        if self._peer_to_peer is True or used.num_local < 2:
            return NONE
        each = self._buffers.host - _HEAD  # what the receiver makes; the sender makes a page
        num, direct = self._channels.collective, self._channels.p2p_each_peer
        neighbours = 2 if used.num_local > 2 and self._uses("tree", ("all_reduce",)) else 1
        most = (num.most * neighbours if used.collectives else 0) + direct.most * used.num_local_peers[1]
        least = (num.least if used.collectives else 0) + direct.least * used.num_local_peers[1]
        page = _HEAD * (1 if used.collectives else 0)
        least_bytes = least * (each + page) if self._peer_to_peer is False and used.num_nodes == 1 else 0
        return Span(least=least_bytes, most=most * (each + page))


def _allows(settings: Mapping[str, str], algorithm: str) -> bool:
    """Whether NCCL_ALGO leaves an algorithm: a list of names, or of those that it excludes after a ^."""
    text = settings.get("NCCL_ALGO", "").strip().lower()
    if not text or ";" in text or ":" in text:
        return True  # what differs by collective is not read
    excludes, names = text.startswith("^"), text.lstrip("^").split(",")
    named = any(name.strip().startswith(algorithm) for name in names)
    return named != excludes


def _reaches_peers(links: Links, settings: Mapping[str, str]) -> bool | None:
    """Whether GPUs of a machine read and write each other's memory; None: it depends on the machine."""
    level = settings.get("NCCL_P2P_LEVEL", "").strip().upper()
    if number(settings, "NCCL_P2P_DISABLE", default=0) or level in ("LOC", "0"):
        return False
    return True if level in ("SYS", "5") and links.reads_peers is not False else links.reads_peers


def _is_eager(settings: Mapping[str, str], version: Version) -> bool | None:
    """Whether all buffers are made with the communicator (no cuMem), not at first use; None: the driver decides."""
    if version < _LAZY or number(settings, "NCCL_CUMEM_ENABLE", default=-2) == 0:
        return True
    if number(settings, "NCCL_RUNTIME_CONNECT", default=1) == 0:
        return True
    return False if number(settings, "NCCL_CUMEM_ENABLE", default=-2) > 0 else None
