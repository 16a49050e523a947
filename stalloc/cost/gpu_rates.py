"""How much known GPUs compute and move in a second, at the most, as their makers state it.

FLOP/s are dense, without sparsity; float32 is without TF32, which torch leaves off for products of matrices. Links are
PCIe 4 of 16 lanes (32 GB/s each way) unless it says otherwise; GPUs reach each other over the same unless they have
NVLink, of which the data sheet states both ways together.
"""

from dataclasses import dataclass

LINK_SHARE, LINK_START = 0.8, 1e-5  #: of what a link promises, that copies of pinned memory reach; seconds to begin


@dataclass(frozen=True)
class GpuRates:
    """What a data sheet promises."""

    half_flops: float  #: a second, in float16 and bfloat16 on tensor cores, accumulated in float32
    single_flops: float  #: a second, in float32 on ordinary cores
    bytes_per_second: float  #: to and from the GPU's own memory
    multiprocessors: int
    source: str
    link_bytes_per_second: float = 32e9  #: to the host, and as much at once from it
    peer_bytes_per_second: float = 0.0  #: to other GPUs of the machine; 0: as to the host
    threads: int = 2048  #: that a multiprocessor holds at once, by NVIDIA's table of compute capabilities


_NVIDIA = "NVIDIA's data sheet of the card"
_T, _G = 1e12, 1e9
_RATES: tuple[tuple[str, GpuRates], ...] = (  # by a part of the name that the driver gives; the first that fits
    ("GB300", GpuRates(2500 * _T, 80 * _T, 8000 * _G, 152, _NVIDIA, 450 * _G, 900 * _G)),
    ("GB200", GpuRates(2500 * _T, 80 * _T, 8000 * _G, 152, _NVIDIA, 450 * _G, 900 * _G)),
    ("B300", GpuRates(2250 * _T, 75 * _T, 8000 * _G, 148, _NVIDIA, 128 * _G, 900 * _G)),
    ("H800", GpuRates(989 * _T, 67 * _T, 3350 * _G, 132, _NVIDIA, 64 * _G, 200 * _G)),
    ("A800-SXM4-80GB", GpuRates(312 * _T, 19.5 * _T, 2039 * _G, 108, _NVIDIA, peer_bytes_per_second=200 * _G)),
    ("GH200", GpuRates(989 * _T, 67 * _T, 4000 * _G, 132, _NVIDIA, 450 * _G, 450 * _G)),
    ("H200", GpuRates(989 * _T, 67 * _T, 4800 * _G, 132, _NVIDIA, 64 * _G, 450 * _G)),
    ("H100 PCIe", GpuRates(756 * _T, 51 * _T, 2000 * _G, 114, _NVIDIA, 64 * _G)),
    ("H100 NVL", GpuRates(835 * _T, 60 * _T, 3900 * _G, 132, _NVIDIA, 64 * _G, 300 * _G)),
    ("H100", GpuRates(989 * _T, 67 * _T, 3350 * _G, 132, _NVIDIA, 64 * _G, 450 * _G)),
    ("A100-SXM4-80GB", GpuRates(312 * _T, 19.5 * _T, 2039 * _G, 108, _NVIDIA, peer_bytes_per_second=300 * _G)),
    ("A100 80GB PCIe", GpuRates(312 * _T, 19.5 * _T, 1935 * _G, 108, _NVIDIA)),
    ("A100", GpuRates(312 * _T, 19.5 * _T, 1555 * _G, 108, _NVIDIA, peer_bytes_per_second=300 * _G)),
    ("A40", GpuRates(149.7 * _T, 37.4 * _T, 696 * _G, 84, _NVIDIA, threads=1536)),
    ("A30", GpuRates(165 * _T, 10.3 * _T, 933 * _G, 56, _NVIDIA)),
    ("A10G", GpuRates(70 * _T, 31.5 * _T, 600 * _G, 80, _NVIDIA, threads=1536)),
    ("A10", GpuRates(125 * _T, 31.2 * _T, 600 * _G, 72, _NVIDIA, threads=1536)),
    ("L40S", GpuRates(362 * _T, 91.6 * _T, 864 * _G, 142, _NVIDIA, threads=1536)),
    ("L40", GpuRates(181 * _T, 90.5 * _T, 864 * _G, 142, _NVIDIA, threads=1536)),
    ("L20", GpuRates(119.5 * _T, 59.8 * _T, 864 * _G, 92, _NVIDIA, threads=1536)),
    ("L4", GpuRates(121 * _T, 30.3 * _T, 300 * _G, 58, _NVIDIA, threads=1536)),
    ("T4", GpuRates(65 * _T, 8.1 * _T, 320 * _G, 40, _NVIDIA, 16 * _G, threads=1024)),
    ("V100", GpuRates(125 * _T, 15.7 * _T, 900 * _G, 80, _NVIDIA, 16 * _G, peer_bytes_per_second=150 * _G)),
    ("RTX 5090", GpuRates(209.5 * _T, 104.8 * _T, 1792 * _G, 170, _NVIDIA, 64 * _G, threads=1536)),
    ("RTX PRO 6000", GpuRates(503.8 * _T, 125 * _T, 1792 * _G, 188, _NVIDIA, 64 * _G, threads=1536)),
    ("RTX 5070", GpuRates(61.7 * _T, 30.9 * _T, 672 * _G, 48, _NVIDIA, 64 * _G, threads=1536)),
    ("RTX 5060", GpuRates(38.4 * _T, 19.2 * _T, 448 * _G, 30, _NVIDIA, 32 * _G, threads=1536)),
    ("RTX 4090", GpuRates(165.2 * _T, 82.6 * _T, 1008 * _G, 128, _NVIDIA, threads=1536)),
    ("RTX 4080", GpuRates(97.5 * _T, 48.7 * _T, 717 * _G, 76, _NVIDIA, threads=1536)),
    ("RTX 3090 Ti", GpuRates(80 * _T, 40 * _T, 1008 * _G, 84, _NVIDIA, threads=1536)),
    ("RTX 3090", GpuRates(71 * _T, 35.6 * _T, 936 * _G, 82, _NVIDIA, threads=1536)),
    ("RTX 3080", GpuRates(59.5 * _T, 29.8 * _T, 760 * _G, 68, _NVIDIA, threads=1536)),
)
_UNKNOWN = "those of an A100: the rates of this GPU are not known"


def rates_of(name: str) -> GpuRates:
    """The rates of a GPU by the name that the driver gives; where they are not known an A100's, which `source` says."""
    if "MIG" not in name:
        for part, rates in _RATES:
            if part in name:
                return rates
    known = dict(_RATES)["A100"]
    return GpuRates(known.half_flops, known.single_flops, known.bytes_per_second, known.multiprocessors, _UNKNOWN)
