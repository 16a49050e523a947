"""What NCCL allocates for a communicator outside of PyTorch's allocator, from the mechanism in its source.

Contract: bytes of one rank, each part as a `Span`, and before them the channels that NCCL makes; both ends are the same
where the source and the links of the machine decide alone. The formulas are those of NCCL 2.28.9 (src/graph/search.cc,
connect.cc and paths.cc for channels of machines whose GPUs all reach each other the same way; src/transport/p2p.cc,
net.cc, shm.cc and nvls.cc, src/init.cc), and for NVLink SHARP also those before 2.22. What is not known of a machine,
such as its network cards, widens a span. Rates are in GB/s, as NCCL counts them. Not counted: NCCL's kernels, which are
part of the CUDA context, its tables of a few MiB, and CollNet (SHARP of InfiniBand switches).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from stalloc.sizes import MIB

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
Version = tuple[int, int, int]

_MOST = 64  # MAXCHANNELS; 32 before 2.25
_BEFORE_225 = 32
_RATES_INTRA = {
    100: (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
    90: (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
    0: (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),
}  # what a channel may have within a machine, by compute capability; the first with the most in all is taken
_RATES_INTER = {
    100: (96, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2),
    90: (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2),
    0: (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2),
}
_LINK_RATES = {100: 40.1, 90: 20.6, 86: 12.0, 70: 20.0}  # of one NVLink (topo.h), from a compute capability on
_NVLINKS_BY_CARD = {
    **dict.fromkeys(("B200", "B300", "GB200", "GB300", "H100", "H200", "H20", "GH200"), 18),
    **dict.fromkeys(("A100-80GB", "A100-40GB"), 12),
    **dict.fromkeys(("H800", "A800"), 8),
}  # through NVSwitch, by NVIDIA's data sheets
_BRIDGED_BY_CARD = {
    **dict.fromkeys(("A100-PCIe-80GB", "A100-PCIe-40GB", "A30", "H100-PCIe", "H100-NVL"), 12),
    **dict.fromkeys(("A40", "RTX-A6000", "RTX-A5000", "RTX-3090", "RTX-3090-Ti"), 4),
}  # links of a bridge, where two cards have one
_MESHED = ("V100-32GB", "V100-16GB")  # six links each, not all to the same card
_PCIE5 = ("H100-PCIe", "H100-NVL", "RTX-PRO-6000", "RTX-5090", "RTX-5080", "RTX-5070", "RTX-5060")
_WITHOUT_P2P = ("RTX-40", "RTX-50", "GB10")  # the driver lets these cards not read each other's memory
_PAGES = 2 * MIB  # what buffers that other processes map are rounded to
_HEAD = 4096  # ncclSendMem and ncclRecvMem
_LL, _LL128, _SIMPLE = 524_288, 4_915_200, 4 * MIB  # buffers of a connection, by protocol
_STEPS, _SHARED_STEPS = 8, 16
_SPLIT_NVLS = _LAZY = (2, 22, 0)  # since when: NVLS by chunks, connections at the first use
_BY_SWITCH = ("all_reduce", "all_gather", "reduce_scatter")
_NET_PEERS = 2  # of a double binary tree: three for half of the channels, one for the others


@dataclass(frozen=True, kw_only=True)
class Span:
    least: int
    most: int

    def __add__(self, other: "Span") -> "Span":
        return Span(least=self.least + other.least, most=self.most + other.most)

    def map(self, of: Callable[[int], int]) -> "Span":
        """Both ends, changed by a function that keeps their order."""
        return Span(least=of(self.least), most=of(self.most))


NONE = Span(least=0, most=0)


@dataclass(frozen=True, kw_only=True)
class Links:
    kind: Literal["nvswitch", "mesh", "bridge or PCIe", "PCIe"]
    capability: int  #: ten times the compute capability: 90
    num_nvlinks: int = 0  #: NVLinks of each GPU
    pcie_gbps: float = 24.0
    reads_peers: bool | None = True  #: whether GPUs reach each other's memory; None: it depends on the machine

    @property
    def nvlink_gbps(self) -> float:
        return self.num_nvlinks * next(rate for since, rate in _LINK_RATES.items() if self.capability >= since)


def links_of(card: str, capability: tuple[int, int]) -> Links:
    number = 10 * capability[0] + capability[1]
    if card in _NVLINKS_BY_CARD:
        return Links(kind="nvswitch", capability=number, num_nvlinks=_NVLINKS_BY_CARD[card])
    if card in _MESHED:
        return Links(kind="mesh", capability=number, num_nvlinks=6)
    pcie = 48.0 if card in _PCIE5 else 24.0
    reads = False if card.startswith(_WITHOUT_P2P) else None
    num = _BRIDGED_BY_CARD.get(card, 0)
    kind: Literal["bridge or PCIe", "PCIe"] = "bridge or PCIe" if num else "PCIe"
    return Links(kind=kind, capability=number, num_nvlinks=num, pcie_gbps=pcie, reads_peers=reads)


@dataclass(frozen=True, kw_only=True)
class Channels:
    collective: Span
    p2p: Span  #: the channels for send and receive
    p2p_each_peer: Span  #: the channels for send and receive with one other rank
    nvls: int  #: the channels for the switch's own reductions (NVLink SHARP); 0: none


def channels_of(
    links: Links,
    *,
    num_local: int,
    num_nodes: int = 1,
    num_ranks: int | None = None,
    settings: Mapping[str, str] | None = None,
    version: tuple[int, int, int] = (2, 28, 9),
) -> Channels:
    """The channels of a communicator with so many ranks on this machine, on so many machines. settings: NCCL's
    environment variables. version: of NCCL."""
    settings = settings or {}
    total = num_ranks if num_ranks is not None else num_local * num_nodes
    most = _MOST if version >= (2, 25, 0) else _BEFORE_225
    if total == 1:
        found = Span(least=most, most=most)  # of itself nothing limits it
    else:
        found = (_within_machine if num_nodes == 1 else _between_machines)(links, num_local)
    # each with an older and a newer name
    highest = number(settings, "NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS", "NCCL_MAX_CTAS", default=most)
    lowest = number(settings, "NCCL_MIN_NCHANNELS", "NCCL_MIN_NRINGS", "NCCL_MIN_CTAS", default=0)
    collective = found.map(lambda num: max(min(num, max(highest, 1), most), min(lowest, most)))
    most_p2p = max(number(settings, "NCCL_MAX_P2P_NCHANNELS", default=_MOST), 1)
    least_p2p = min(number(settings, "NCCL_MIN_P2P_NCHANNELS", default=1), _MOST)
    p2p = collective.map(lambda num: _power_of_two(max(min(num, most_p2p), least_p2p)))
    return Channels(
        collective=collective,
        p2p=p2p,
        p2p_each_peer=_each_peer(links, p2p, num_nodes, total),
        nvls=_nvls(links, num_local, num_nodes, settings),
    )


def number(settings: Mapping[str, str], *names: str, default: int) -> int:
    """The first of these variables that is a number, 0x allowed; NCCL takes others for none."""
    for name in names:
        try:
            return int(settings[name].strip(), 0)
        except (KeyError, ValueError):
            continue
    return default


def _channels(
    table: Mapping[int, tuple[float, ...]], capability: int, num_rings: Callable[[float], int]
) -> tuple[int, float]:
    """Channels, and the rate of each ring: the most in all, with so many rings of each rate, looked for down to half of
    the rate that was found (search.cc); rings that are fast enough are split in two (ncclTopoDupChannels)."""
    rates = next(rates for since, rates in table.items() if capability >= since)
    num, best = 0, 0.0
    for rate in rates:
        if num and rate / best <= 0.49:
            break
        if num_rings(rate) * rate > num * best:
            num, best = num_rings(rate), rate
    if not num:
        num, best = 1, rates[-1]
    if best >= 25 and not (capability > 80 and best < 50 and num > 4):
        num, best = 2 * num, best / 2
    return 2 * num, best  # each ring is used twice (ncclTopoPostset)


def _at_rate(links: Links, gbps: float) -> int:
    return _channels(_RATES_INTRA, links.capability, lambda rate: int(gbps / rate))[0]


def _within_machine(links: Links, num_local: int) -> Span:
    by_pcie = Span(least=2, most=_at_rate(links, min(links.pcie_gbps, 48.0)))  # 2: through the processors' own links
    if links.kind == "nvswitch":
        num = _at_rate(links, links.nvlink_gbps)
        return Span(least=num, most=num)
    if links.kind == "mesh" or (links.kind == "bridge or PCIe" and num_local == 2):
        return Span(least=by_pcie.least, most=max(by_pcie.most, _at_rate(links, links.nvlink_gbps)))
    return by_pcie


def _between_machines(links: Links, num_local: int) -> Span:
    """The channels between machines with half a network card or one for each GPU, at the rates sold with such GPUs."""
    nics = {max(1, num_local // 2), num_local} if links.kind == "nvswitch" else {1, max(1, num_local // 2), num_local}
    gbps = (24.0, 48.0, 96.0)[: 3 if links.capability >= 100 else 2] if links.capability >= 90 else (12.0, 24.0)
    found = [_with_network(links, num_local, num, rate) for num in nics for rate in gbps]
    return Span(least=min(found), most=max(found))


def _with_network(links: Links, num_local: int, num_nics: int, nic_gbps: float) -> int:
    within = links.nvlink_gbps if links.kind in ("nvswitch", "mesh") else links.pcie_gbps

    def num_rings(rate: float) -> int:
        num = num_nics * int(nic_gbps / rate)
        return min(num, int(within / rate)) if num_local > 1 else num

    num, rate = _channels(_RATES_INTER, links.capability, num_rings)
    return 2 * num if links.capability >= 90 and rate > 45 and num < 16 else num


def _power_of_two(num: int) -> int:
    return 1 << max(num - 1, 0).bit_length()


def _each_peer(links: Links, p2p: Span, num_nodes: int, num_ranks: int) -> Span:
    if num_nodes > 1:  # as few as the slowest peer has, and fewer where there are many (paths.cc)
        return Span(least=1 if num_ranks > 8 * p2p.least // 2 else min(2, p2p.least), most=min(2, p2p.most))
    by_nvlink = _power_of_two(2 * links.num_nvlinks)
    if links.kind == "nvswitch":  # without a switch, where three others share the links, fewer
        return Span(least=min(by_nvlink, p2p.least), most=min(by_nvlink, p2p.most))
    return Span(least=min(2, p2p.least), most=min(max(2, by_nvlink), p2p.most))


def _nvls(links: Links, num_local: int, num_nodes: int, settings: Mapping[str, str]) -> int:
    if links.kind != "nvswitch" or links.capability < 90 or num_local <= 2:
        return 0
    if number(settings, "NCCL_NVLS_ENABLE", default=2) == 0:
        return 0
    usual = 16 if links.capability < 100 else 24 if num_nodes == 1 else 32
    return number(settings, "NCCL_NVLS_NCHANNELS", default=usual)


@dataclass(frozen=True, kw_only=True)
class Communicator:
    num_ranks: int
    rank: int = 0
    num_local: int  #: the number of its ranks on this machine
    local_index: int = 0  #: which of the ranks on this machine this one is, in the order of ranks
    num_nodes: int = 1
    collectives: Collection[Collective] = ()
    num_local_peers: tuple[int, int] = (0, 0)  #: other ranks on this machine that it sends to, and receives from
    num_remote_peers: tuple[int, int] = (0, 0)  #: ranks on other machines that it sends to, and receives from

    @property
    def is_used(self) -> bool:
        """Whether NCCL makes it at all: PyTorch does at the first call."""
        return bool(self.collectives) or any(self.num_local_peers) or any(self.num_remote_peers)


@dataclass(frozen=True, kw_only=True)
class NcclMemory:
    channels: Channels
    parts: dict[str, Span] = field(default_factory=dict)  #: on the device: ring, tree, switch, sends, network
    pinned: Span = NONE  #: pinned host memory of the proxies that talk to network cards
    shared_memory: Span = NONE
    """Below /dev/shm, where GPUs do not reach each other; pinned where NCCL makes it with cuMem."""

    @property
    def device(self) -> Span:
        return sum(self.parts.values(), NONE)


def nccl_memory(
    links: Links,
    used: Communicator,
    *,
    settings: Mapping[str, str] | None = None,
    version: Version = (2, 28, 9),
    channels: Channels | None = None,
) -> NcclMemory:
    """What NCCL takes for a communicator. settings: its environment variables (NCCL_BUFFSIZE and others: docs/node.md
    lists them). channels: where they are known, as from the log of a run ("24 coll channels, 16 nvls channels, 32 p2p
    channels, 32 p2p channels per peer")."""
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
    model = _Model(links, used, settings, version, found)
    parts = {
        "ring": model.ring(),
        "tree": model.tree(),
        "switch": model.switch(),
        "sends": model.sends(),
        "network": model.shared_by_peers(),
    }
    return NcclMemory(
        channels=found,
        parts={name: span for name, span in parts.items() if span.most},
        pinned=model.proxies(),
        shared_memory=model.between_processes(),
    )


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _PAGES) * _PAGES


class _Model:
    """The parts of one communicator."""

    def __init__(
        self, links: Links, used: Communicator, settings: Mapping[str, str], version: Version, channels: Channels
    ) -> None:
        self._links, self._used, self._settings = links, used, settings
        self._version, self._channels = version, channels
        self._peer_to_peer = _reaches_peers(links, settings)
        self._is_eager = _is_eager(settings, version)
        simple = number(settings, "NCCL_BUFFSIZE", default=_SIMPLE)
        low = number(settings, "NCCL_LL_BUFFSIZE", default=_LL)
        low128 = number(settings, "NCCL_LL128_BUFFSIZE", default=_LL128)
        reads = links.capability == 80 and links.num_nvlinks > 0  # then the sender keeps the large buffer
        at_sender = simple * bool(number(settings, "NCCL_P2P_READ_ENABLE", default=int(reads)))
        # bytes of the ends of a connection on the device
        self._receives = _rounded(_HEAD + low + low128 + simple - at_sender)
        self._sends = _rounded(_HEAD + at_sender)
        self._both = self._receives + self._sends
        self._net = _rounded(low128 + simple)  # either end at a network card that reaches the device's memory
        # either end at one that does not; also what processes share where GPUs do not reach each other
        self._host = low + low128 + simple + 2 * _HEAD
        self._host_least = low + 2 * _HEAD  # what an end whose large buffers are on the device has on the host

    def _uses(self, algorithm: str, collectives: Collection[str]) -> bool:
        """Whether calls that were made may choose an algorithm."""
        return bool(set(collectives) & set(self._used.collectives)) and _allows(self._settings, algorithm)

    def _within(self, num: Span, size_bytes: int) -> Span:
        """Bytes of `num` connections within the machine; none are on the device if its GPUs do not reach each other."""
        least, most = self._peer_to_peer is True, self._peer_to_peer is not False
        return Span(least=num.least * size_bytes * least, most=num.most * size_bytes * most)

    def _at_network(self) -> Span:
        """Channels whose ring enters or leaves the machine at this rank, for each direction."""
        num, local = self._channels.collective, self._used.num_local
        if self._used.num_nodes == 1:
            return NONE
        return num if local == 1 else Span(least=0, most=min(num.most, -(-2 * num.most // local)))

    def ring(self) -> Span:
        used = self._used
        if used.num_ranks < 2 or not (used.collectives or self._is_eager is True):
            return NONE
        net = self._at_network()
        if used.num_nodes > 1 and used.num_local == 1:
            return Span(least=0, most=2 * net.most * self._net)  # none where cards do not reach the device
        found = self._within(self._channels.collective, self._both)
        more = net.most * max(0, 2 * self._net - self._both)
        return Span(least=found.least, most=found.most + more) if net.most else self._or_lazily(found, "ring")

    def _or_lazily(self, found: Span, part: str) -> Span:
        """A part that is made at its first use, if calls may or may not use it."""
        certain = self._is_eager is True or (part == "ring" and bool(self._used.collectives))
        return found if certain else Span(least=0, most=found.most)

    def tree(self) -> Span:
        used = self._used
        if used.num_ranks < 3 and used.num_nodes == 1:
            return NONE  # the other rank is the ring's neighbour in both directions
        if self._is_eager is not True and not self._uses("tree", ("all_reduce",)):
            return NONE
        is_first, is_last = used.local_index == 0, used.local_index == used.num_local - 1
        # within a machine the tree is a chain: its ends have one neighbour, with whom the ring has one direction
        size = self._receives if is_first else self._sends if is_last else self._both
        found = self._within(self._channels.collective, size) if used.num_local > 1 else NONE
        found += Span(least=0, most=2 * _NET_PEERS * self._at_network().most * self._net)
        return self._or_lazily(found, "tree") if used.num_nodes == 1 else Span(least=0, most=found.most)

    def switch(self) -> Span:
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
            found += Span(least=0, most=2 * peers * num * self._net)
        return found

    def sends(self) -> Span:
        """Buffers for each other rank on the machine that send and receive were first used with."""
        to, source = self._used.num_local_peers
        size = to * self._sends + source * self._receives
        return self._within(self._channels.p2p_each_peer, size)

    def shared_by_peers(self) -> Span:
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
        is_needed, num = is_certain or self._is_eager is None, self._channels.p2p
        return Span(least=num.least * size * is_certain, most=num.most * size * is_needed)

    def proxies(self) -> Span:
        """Pinned memory of connections through network cards; large buffers are there if cards see the host only."""
        if self._used.num_nodes == 1 or not self._used.collectives:
            return NONE
        net = self._at_network()
        trees = _NET_PEERS if self._uses("tree", ("all_reduce",)) else 0
        return Span(least=2 * net.least * self._host_least, most=2 * (1 + trees) * net.most * self._host)

    def between_processes(self) -> Span:
        """What GPUs that do not reach each other exchange through: the receiver keeps the buffers (shm.cc)."""
        used = self._used
        if self._peer_to_peer is True or used.num_local < 2:
            return NONE
        each = self._host - _HEAD  # what the receiver makes; the sender makes a page
        num, direct = self._channels.collective, self._channels.p2p_each_peer
        neighbours = 2 if used.num_local > 2 and self._uses("tree", ("all_reduce",)) else 1
        most = (num.most * neighbours if used.collectives else 0) + direct.most * used.num_local_peers[1]
        least = (num.least if used.collectives else 0) + direct.least * used.num_local_peers[1]
        page = _HEAD * bool(used.collectives)
        least_bytes = least * (each + page) if self._peer_to_peer is False and used.num_nodes == 1 else 0
        return Span(least=least_bytes, most=most * (each + page))


def _allows(settings: Mapping[str, str], algorithm: str) -> bool:
    """Whether NCCL_ALGO leaves an algorithm: a list of names, or of those that it excludes after a ^."""
    text = settings.get("NCCL_ALGO", "").strip().lower()
    if not text or ";" in text or ":" in text:
        return True  # what differs by collective is not read
    excludes, names = text.startswith("^"), text.lstrip("^").split(",")
    return any(name.strip().startswith(algorithm) for name in names) != excludes


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
