"""How many channels NCCL makes for a communicator, from the links of a machine.

Contract: a `Span` from the least to the most; both are the same where the links decide alone. The search is that of
NCCL 2.28 (src/graph/search.cc, connect.cc and paths.cc) for machines whose GPUs all reach each other the same way. What
is not known of a machine, such as its network cards, widens the span. Rates are in GB/s, as NCCL counts them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, kw_only=True)
class Span:
    """A range of numbers, from the least to the most."""

    least: int
    most: int

    def __add__(self, other: "Span") -> "Span":
        return Span(least=self.least + other.least, most=self.most + other.most)


@dataclass(frozen=True, kw_only=True)
class Links:
    """How the GPUs of one machine reach each other."""

    kind: Literal["nvswitch", "mesh", "bridge or PCIe", "PCIe"]
    capability: int
    """Ten times the compute capability: 90."""
    num_nvlinks: int = 0
    """NVLinks of each GPU."""
    pcie_gbps: float = 24.0
    reads_peers: bool | None = True
    """Whether GPUs reach each other's memory; None: it depends on the machine."""

    @property
    def nvlink_gbps(self) -> float:
        """GB/s of all NVLinks of a GPU together."""
        return self.num_nvlinks * next(rate for since, rate in _LINK_RATES.items() if self.capability >= since)


def links_of(card: str, capability: tuple[int, int]) -> Links:
    """The links of a card, by its name in `known_gpus`."""
    number = 10 * capability[0] + capability[1]
    if card in _NVLINKS_BY_CARD:
        return Links(kind="nvswitch", capability=number, num_nvlinks=_NVLINKS_BY_CARD[card])
    if card in _MESHED:
        return Links(kind="mesh", capability=number, num_nvlinks=6)
    pcie = 48.0 if card in _PCIE5 else 24.0
    reads = False if card.startswith(_WITHOUT_P2P) else None
    if card in _BRIDGED_BY_CARD:
        num = _BRIDGED_BY_CARD[card]
        return Links(kind="bridge or PCIe", capability=number, num_nvlinks=num, pcie_gbps=pcie, reads_peers=reads)
    return Links(kind="PCIe", capability=number, pcie_gbps=pcie, reads_peers=reads)


@dataclass(frozen=True, kw_only=True)
class Channels:
    """The channels of one communicator."""

    collective: Span
    p2p: Span
    """The channels for send and receive."""
    p2p_each_peer: Span
    """The channels for send and receive with one other rank."""
    nvls: int
    """The channels for the switch's own reductions (NVLink SHARP); 0: none."""


def channels_of(
    links: Links,
    *,
    num_local: int,
    num_nodes: int = 1,
    num_ranks: int | None = None,
    settings: Mapping[str, str] | None = None,
    version: tuple[int, int, int] = (2, 28, 9),
) -> Channels:
    """The channels of a communicator with so many ranks on this machine, on so many machines.

    settings: NCCL's environment variables. version: of NCCL.
    """
    settings = settings or {}
    total = num_ranks if num_ranks is not None else num_local * num_nodes
    most = _MOST if version >= (2, 25, 0) else _BEFORE_225
    if total == 1:
        found = Span(least=most, most=most)  # of itself nothing limits it
    elif num_nodes == 1:
        found = _within_machine(links, num_local)
    else:
        found = _between_machines(links, num_local)
    collective = _limited(found, settings, most)
    p2p = _p2p(collective, settings)
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


def _rates(table: Mapping[int, tuple[float, ...]], capability: int) -> tuple[float, ...]:
    return next(rates for since, rates in table.items() if capability >= since)


def _doubled(num: int, rate: float, capability: int) -> tuple[int, float]:
    """The number of rings and their rate, each ring split in two where it is fast enough (ncclTopoDupChannels)."""
    if rate < 25 or (capability > 80 and rate < 50 and num > 4):
        return num, rate
    return 2 * num, rate / 2


def _channels(num: int, rate: float, capability: int) -> tuple[int, float]:
    num, rate = _doubled(num, rate, capability)
    return 2 * num, rate  # each ring is used twice (ncclTopoPostset)


def _rings(rates: tuple[float, ...], nums: list[int]) -> tuple[int, float]:
    """Rings and the rate of each: the most in all, looked for down to half of the rate that was found (search.cc)."""
    found = (0, 0.0)
    for num, rate in zip(nums, rates, strict=True):
        if found[0] and rate / found[1] <= 0.49:
            break
        if num * rate > found[0] * found[1]:
            found = (num, rate)
    return found if found[0] else (1, rates[-1])


def _at_rate(links: Links, gbps: float) -> int:
    rates = _rates(_RATES_INTRA, links.capability)
    num, rate = _rings(rates, [int(gbps / rate) for rate in rates])
    return _channels(num, rate, links.capability)[0]


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
    fast = links.capability >= 90
    nics = {max(1, num_local // 2), num_local} if links.kind == "nvswitch" else {1, max(1, num_local // 2), num_local}
    gbps = (24.0, 48.0, 96.0)[: 3 if links.capability >= 100 else 2] if fast else (12.0, 24.0)
    found = [_with_network(links, num_local, num, rate) for num in nics for rate in gbps]
    return Span(least=min(found), most=max(found))


def _with_network(links: Links, num_local: int, num_nics: int, nic_gbps: float) -> int:
    rates = _rates(_RATES_INTER, links.capability)
    within = links.nvlink_gbps if links.kind in ("nvswitch", "mesh") else links.pcie_gbps
    nums = [
        min(num_nics * int(nic_gbps / rate), int(within / rate) if num_local > 1 else num_nics * int(nic_gbps / rate))
        for rate in rates
    ]
    num, rate = _channels(*_rings(rates, nums), links.capability)
    return 2 * num if links.capability >= 90 and rate > 45 and num < 16 else num


def _limited(found: Span, settings: Mapping[str, str], most: int) -> Span:
    """A number limited by NCCL_MAX_NCHANNELS, then by NCCL_MIN_NCHANNELS, each with an older and a newer name."""
    highest = number(settings, "NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS", "NCCL_MAX_CTAS", default=most)
    lowest = number(settings, "NCCL_MIN_NCHANNELS", "NCCL_MIN_NRINGS", "NCCL_MIN_CTAS", default=0)

    def limit(num: int) -> int:
        return max(min(num, max(highest, 1), most), min(lowest, most))

    return Span(least=limit(found.least), most=limit(found.most))


def _power_of_two(num: int) -> int:
    return 1 << max(num - 1, 0).bit_length()


def _p2p(collective: Span, settings: Mapping[str, str]) -> Span:
    highest = number(settings, "NCCL_MAX_P2P_NCHANNELS", default=_MOST)
    lowest = number(settings, "NCCL_MIN_P2P_NCHANNELS", default=1)

    def of(num: int) -> int:
        return _power_of_two(max(min(num, max(highest, 1)), min(lowest, _MOST)))

    return Span(least=of(collective.least), most=of(collective.most))


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
