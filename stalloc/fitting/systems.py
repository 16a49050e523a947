"""Published systems that let a program need less memory, and which part of each stalloc implements today.

Contract: a status says what is done, not what is meant to be. "executes": runs for real; "in part": so does the part of
it that is named, and what the system is about is not there as a whole; "emulates": runs, with a stand-in for hardware;
"replays": on a trace; "reports": a figure from a formula.
"""

from dataclasses import dataclass
from typing import Literal

Status = Literal["executes", "in part", "emulates", "replays", "reports"]


@dataclass(frozen=True)
class System:
    """One system, by the name that `stalloc fit --policy` takes where it executes within a fit."""

    name: str
    source: str  #: who published it
    does: str
    status: Status
    where: str = ""  #: what to type


_SHARD = "stalloc shard --ranks N --way"
_FIT, _SWAP = "stalloc fit --policy", "stalloc swap --budget SIZE"  # of a program, of a recording with --ops
_EVICT = "stalloc evict --budget 0.5 --policy"  # of a recording with --ops
SYSTEMS: tuple[System, ...] = (
    System("recompute", "stalloc", "operations and blocks, most bytes for a second first", "executes", "stalloc fit"),
    System("blocks:N", "Chen et al. 2016", "the first N blocks as a whole", "executes", f"{_FIT} blocks:N"),
    System(
        "keep-attention",
        "LoongTrain, DistFlashAttn",
        "all but the results of attention (also called remat-aware)",
        "executes",
        f"{_FIT} keep-attention",
    ),
    System(
        "selective",
        "Korthikanti et al.",
        "the core of attention that is written out",
        "executes",
        f"{_FIT} selective",
    ),
    System(
        "checkmate",
        "Checkmate",
        "the cheapest choice of blocks, proven",
        "executes",
        f"{_FIT} checkmate --budget SIZE",
    ),
    System(
        "step-in-backward",
        "LOMO, PyTorch",
        "updates as gradients come",
        "executes",
        f"{_FIT} step-in-backward",
    ),
    System("compile-budget", "PyTorch", "a share for compiled code", "executes", f"{_FIT} compile-budget"),
    System("stalloc", "STAlloc (Huang et al.)", "a plan of where everything lives", "executes", "stalloc run"),
    System("expandable", "PyTorch", "expandable segments", "replays", "stalloc simulate"),
    System("gmlake", "GMLake", "stitches blocks of mapped memory", "replays", "stalloc simulate --allocator gmlake"),
    System("zero-r", "ZeRO-R (DeepSpeed)", "contiguous buffers", "executes", "stalloc.contiguous_buffers"),
    System(
        "annealing", "Imanishi and Xu", "a plan by simulated annealing", "executes", "stalloc plan --method annealing"
    ),
    System(
        "roam", "ROAM", "another order of operations, laid out", "replays", "stalloc stats --order (after record --ops)"
    ),
    System(
        "dtr",
        "DTR",
        "evicts what costs least for its size and age, as memory is short; blocks, where it runs",
        "executes",
        f"stalloc run --cap SIZE --cap-policy dtr, {_EVICT} dtr,dtr-eq,dtr-local",
    ),
    System("dte", "MegTaiChi", "the same, free neighbours counted (DTE; not DTP, TMA)", "replays", f"{_EVICT} dte"),
    System("coop", "Coop", "evicts neighbours in memory that make room", "replays", f"{_EVICT} coop"),
    System(
        "offload-ratio",
        "Yuan et al.",
        "a share of saved activations in host memory",
        "executes",
        f"{_FIT} offload-ratio --host SIZE",
    ),
    System(
        "tsplit",
        "TSPLIT",
        "one case: the head and its loss, rows in parts",
        "in part",
        "stalloc.chunked_cross_entropy",
    ),
    System(
        "tmo",
        "TMO (Lin et al. 2023)",
        "ranks on one link swap other tensors, in turn",
        "emulates",
        f"{_SWAP} --ranks N, stalloc.SharedLink",
    ),
    System("page", "stalloc", "optimizer state in host memory, part by part", "executes", f"{_FIT} page --host SIZE"),
    System(
        "zero-offload",
        "ZeRO-Offload",
        "gradients leave in backward, Adam updates on the processor",
        "executes",
        f"{_FIT} zero-offload --host SIZE",
    ),
    System(
        "twin-flow", "DeepSpeed", "the same of a share of parameters", "executes", f"{_FIT} twin-flow:SHARE --host SIZE"
    ),
    System(
        "l2l",
        "L2L",
        "one layer, and its gradients, at a time; microbatches go through it in turn",
        "executes",
        f"{_FIT} l2l --host SIZE, stalloc.stream_layers(model, window=1, microbatches=N)",
    ),
    System(
        "stronghold",
        "STRONGHOLD",
        "a window of layers, updated on the processor beside backward",
        "executes",
        f"{_FIT} stronghold --host SIZE",
    ),
    System("harmony", "Harmony", "packs of layers, swapped", "replays", _SWAP),
    System("mobius", "Mobius", "stages swapped over one root", "replays", _SWAP),
    System("patrickstar", "PatrickStar", "parameters in chunks", "replays", _SWAP),
    System("elixir", "Elixir", "the size of chunks, searched", "replays", _SWAP),
    System(
        "zero-infinity",
        "ZeRO-Infinity",
        "state and layers on disk",
        "executes",
        f"{_FIT} zero-infinity --host SIZE --disk FOLDER:SIZE",
    ),
    System("angel", "Angel-PTM", "parameters in pages of 4 MiB", "replays", _SWAP),
    System("smart-infinity", "Smart-Infinity", "updates in drives that compute", "reports", _SWAP),
    System("lohan", "LoHan", "how many activations to swap to the host, no disk", "replays", _SWAP),
    System("moe-cache", "MoESys", "a cache of experts for inference, by use", "in part", "stalloc.cache_experts"),
    System("zero-1…3", "ZeRO", "state, gradients, weights over ranks", "executes", f"{_SHARD} zero-1, zero-2, zero-3"),
    System("fsdp", "PyTorch FSDP", "units of weights over ranks", "executes", f"{_SHARD} zero-3"),
    System(
        "zero++",
        "ZeRO++",
        "a second copy within a node; the quantised gather is stalloc.techniques.quantised_gather, by itself",
        "in part",
        f"{_SHARD} hpz:K",
    ),
    System("mics", "MiCS", "groups of ranks", "executes", f"{_SHARD} mics:K"),
    System(
        "paro",
        "PaRO",
        "all 14 triples are costed; those that PyTorch has something for run",
        "in part",
        "stalloc shard --ranks N --per-node K",
    ),
    System(
        "amsp",
        "AMSP",
        "the cheapest triple under a cap, among those that run",
        "in part",
        "stalloc shard --ranks N --factors all --budget SIZE",
    ),
    System(
        "rtp",
        "RTP",
        "weights that rotate, of linear layers",
        "in part",
        "stalloc.techniques.rotated_linear.RotatedLinear",
    ),
)
