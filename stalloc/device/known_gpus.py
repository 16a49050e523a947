"""GPUs by name, so that a program can be tried on one that is not there.

The memory of each is what PyTorch and the driver report as usable, to within about one per cent: it depends on the
driver, on error correction (ECC) and on the board. Give the number of your own GPU where it matters.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.sizes import MIB

PLENTY = 1 << 41  #: bytes to see what is taken; expandable segments take more than this of addresses, for each stream

_MAX_BYTES = 1 << 62  # so that sums of two sizes still fit the fields of 64 bits that they travel in
_MAX_DIGITS = 30  # of a number that is written out; Python refuses to read very long ones


COMPLETION = "STALLOC_VIRTUAL_COMPLETION"  #: the variable of that name, for a process and those that it starts
Completion = Literal["at-once", "timeline", "at-waits"]
"""When work is done: by the time anybody asks; when it would be on a GPU, by estimated times; not before the host waits
for it."""
COMPLETIONS: tuple[Completion, ...] = get_args(Completion)


@dataclass(frozen=True, kw_only=True)
class VirtualGPU:
    """The GPU that is pretended: what programs see of it, and how much of their data is really kept."""

    name: str = "Virtual GPU"
    total_bytes: int = 80 << 30
    compute_capability: tuple[int, int] = (9, 0)
    num_devices: int = 1
    copy_limit_bytes: int | None = 1 << 20
    """Larger writes to device memory are skipped, so that its pages stay untouched; None makes every copy."""
    num_multiprocessors: int = 132
    context_bytes: int = 0
    """What each context takes of the memory as it is made; by default nothing is set aside for it."""

    def __post_init__(self) -> None:
        if not 0 < self.total_bytes <= _MAX_BYTES:
            raise BadInputError(f"a GPU of {self.total_bytes:,} bytes is impossible: give a size up to 4 EiB.")
        if not 0 <= self.context_bytes < self.total_bytes:
            context = f"a context of {self.context_bytes:,} bytes"
            raise BadInputError(f"{context} leaves nothing of {self.total_bytes:,}: give it less.")
        if not 1 <= self.num_devices <= 64:
            raise BadInputError(f"{self.num_devices} devices are not possible: choose 1 to 64.")
        if self.copy_limit_bytes is not None and self.copy_limit_bytes < 0:
            limit = f"a copy limit of {self.copy_limit_bytes} bytes"
            raise BadInputError(f"{limit} is not possible: give 0 or more, or None.")


# Where a card's memory is from: what torch.cuda.get_device_properties or deviceQuery printed on such a card, as others
# published it; NVIDIA's MIG User Guide, which lists the slices; or computed, from the capacity that out-of-memory
# messages on such a card name or from a card with the same chips. Multiprocessors are of the same print or of the
# vendor's data sheet.
# _LISTED is what nvidia-smi lists for such a card, or of GB10, which shares the memory of its host, what Linux sees.
_PRINTED, _GUIDE, _COMPUTED, _LISTED = "printed on such a card", "MIG User Guide", "computed", "listed by the driver"

# name here, name that the driver gives, MiB of memory, compute capability, multiprocessors, where the memory is from
_CARDS = (
    ("B200", "NVIDIA B200", 182_642, (10, 0), 148, _PRINTED),
    ("B300", "NVIDIA B300 SXM6 AC", 275_040, (10, 3), 148, _LISTED),
    ("GB300", "NVIDIA GB300", 284_208, (10, 3), 152, _LISTED),
    ("GB200", "NVIDIA GB200", 189_471, (10, 0), 152, _LISTED),
    ("GB10", "NVIDIA GB10", 122_570, (12, 1), 48, _LISTED),
    ("H200", "NVIDIA H200", 143_156, (9, 0), 132, _COMPUTED),
    ("H100", "NVIDIA H100 80GB HBM3", 81_079, (9, 0), 132, _PRINTED),
    ("H100-PCIe", "NVIDIA H100 PCIe", 81_008, (9, 0), 114, _PRINTED),
    ("H100-NVL", "NVIDIA H100 NVL", 95_355, (9, 0), 132, _COMPUTED),
    ("H20", "NVIDIA H20", 97_285, (9, 0), 78, _PRINTED),
    ("H800", "NVIDIA H800", 81_079, (9, 0), 132, _COMPUTED),
    ("GH200", "NVIDIA GH200 480GB", 96_768, (9, 0), 132, _COMPUTED),
    ("A100-80GB", "NVIDIA A100-SXM4-80GB", 81_251, (8, 0), 108, _COMPUTED),
    ("A100-PCIe-80GB", "NVIDIA A100 80GB PCIe", 81_049, (8, 0), 108, _PRINTED),
    ("A100-40GB", "NVIDIA A100-SXM4-40GB", 40_536, (8, 0), 108, _PRINTED),
    ("A100-PCIe-40GB", "NVIDIA A100-PCIE-40GB", 40_326, (8, 0), 108, _PRINTED),
    ("A800", "NVIDIA A800-SXM4-80GB", 81_251, (8, 0), 108, _COMPUTED),
    ("A40", "NVIDIA A40", 45_416, (8, 6), 84, _PRINTED),
    ("A30", "NVIDIA A30", 24_169, (8, 0), 56, _COMPUTED),
    ("A10", "NVIDIA A10", 22_592, (8, 6), 72, _COMPUTED),
    ("A10G", "NVIDIA A10G", 22_587, (8, 6), 80, _PRINTED),
    ("L40S", "NVIDIA L40S", 45_589, (8, 9), 142, _PRINTED),
    ("L40", "NVIDIA L40", 45_589, (8, 9), 142, _COMPUTED),
    ("L20", "NVIDIA L20", 45_589, (8, 9), 92, _COMPUTED),
    ("L4", "NVIDIA L4", 22_563, (8, 9), 58, _COMPUTED),
    ("T4", "Tesla T4", 15_095, (7, 5), 40, _COMPUTED),
    ("V100-32GB", "Tesla V100-SXM2-32GB", 32_510, (7, 0), 80, _COMPUTED),
    ("V100-16GB", "Tesla V100-SXM2-16GB", 16_160, (7, 0), 80, _PRINTED),
    ("A100-40GB-MIG-1g", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4_864, (8, 0), 14, _GUIDE),
    ("A100-40GB-MIG-2g", "NVIDIA A100-SXM4-40GB MIG 2g.10gb", 9_984, (8, 0), 28, _GUIDE),
    ("A100-40GB-MIG-3g", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20_090, (8, 0), 42, _GUIDE),
    ("A100-80GB-MIG-1g", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9_728, (8, 0), 14, _PRINTED),
    ("A100-80GB-MIG-2g", "NVIDIA A100-SXM4-80GB MIG 2g.20gb", 19_968, (8, 0), 28, _PRINTED),
    ("A100-80GB-MIG-3g", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40_192, (8, 0), 42, _GUIDE),
    ("H100-MIG-1g", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9_984, (9, 0), 16, _GUIDE),
    ("H100-MIG-2g", "NVIDIA H100 80GB HBM3 MIG 2g.20gb", 20_090, (9, 0), 32, _GUIDE),
    ("H100-MIG-3g", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40_448, (9, 0), 60, _GUIDE),
    ("RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97_249, (12, 0), 188, _COMPUTED),
    ("RTX-6000-Ada", "NVIDIA RTX 6000 Ada Generation", 48_622, (8, 9), 142, _PRINTED),
    ("RTX-A6000", "NVIDIA RTX A6000", 48_676, (8, 6), 84, _PRINTED),
    ("RTX-A5000", "NVIDIA RTX A5000", 24_114, (8, 6), 64, _PRINTED),
    ("RTX-A4000", "NVIDIA RTX A4000", 16_095, (8, 6), 48, _COMPUTED),
    ("RTX-5090", "NVIDIA GeForce RTX 5090", 32_119, (12, 0), 170, _COMPUTED),
    ("RTX-5080", "NVIDIA GeForce RTX 5080", 16_302, (12, 0), 84, _PRINTED),
    ("RTX-5070", "NVIDIA GeForce RTX 5070", 12_226, (12, 0), 48, _COMPUTED),
    ("RTX-5060", "NVIDIA GeForce RTX 5060", 8_150, (12, 0), 30, _COMPUTED),
    ("RTX-4090", "NVIDIA GeForce RTX 4090", 24_217, (8, 9), 128, _COMPUTED),
    ("RTX-4080", "NVIDIA GeForce RTX 4080", 16_049, (8, 9), 76, _PRINTED),
    ("RTX-4070-Ti", "NVIDIA GeForce RTX 4070 Ti", 12_001, (8, 9), 60, _COMPUTED),
    ("RTX-4070", "NVIDIA GeForce RTX 4070", 12_001, (8, 9), 46, _COMPUTED),
    ("RTX-4060-Ti", "NVIDIA GeForce RTX 4060 Ti", 7_940, (8, 9), 34, _COMPUTED),
    ("RTX-4060", "NVIDIA GeForce RTX 4060", 7_806, (8, 9), 24, _COMPUTED),
    ("RTX-3090-Ti", "NVIDIA GeForce RTX 3090 Ti", 24_259, (8, 6), 84, _COMPUTED),
    ("RTX-3090", "NVIDIA GeForce RTX 3090", 24_268, (8, 6), 82, _COMPUTED),
    ("RTX-3080-Ti", "NVIDIA GeForce RTX 3080 Ti", 12_053, (8, 6), 80, _COMPUTED),
    ("RTX-3080", "NVIDIA GeForce RTX 3080", 10_015, (8, 6), 68, _COMPUTED),
    ("RTX-3070", "NVIDIA GeForce RTX 3070", 7_977, (8, 6), 46, _COMPUTED),
    ("RTX-3060-Ti", "NVIDIA GeForce RTX 3060 Ti", 7_977, (8, 6), 38, _COMPUTED),
    ("RTX-3060", "NVIDIA GeForce RTX 3060", 11_931, (8, 6), 28, _PRINTED),
    ("RTX-2080-Ti", "NVIDIA GeForce RTX 2080 Ti", 11_019, (7, 5), 68, _PRINTED),
)
KNOWN_GPUS: dict[str, VirtualGPU] = {
    key: VirtualGPU(name=name, total_bytes=mib * MIB, compute_capability=capability, num_multiprocessors=num)
    for key, name, mib, capability, num, _ in _CARDS
}
MEMORY_SOURCES: dict[str, str] = {key: source for key, *_, source in _CARDS}
"""Where the memory of each of KNOWN_GPUS is from."""
DEFAULT_GPU = KNOWN_GPUS["H200"]


def takes_what_is_free(total_bytes: int, reserved_bytes: int) -> bool:
    """Whether a program that was given plenty took most of it, as only one does that goes by what is free."""
    return total_bytes == PLENTY and reserved_bytes > PLENTY // 2


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def shown_name(kind: str, name: str) -> str:
    """What people read of a device: a virtual one says so."""
    return name if kind != "virtual" or name.lower().startswith("virtual") else f"virtual {name}"


def shown_with_memory(kind: str, name: str, total_bytes: int) -> str:
    """What people read of a device and how much memory it has, which is left out if the name says it."""
    shown, memory = shown_name(kind, name), human_bytes(total_bytes)
    return shown if memory in shown else f"{shown}, {memory}"


def find_gpu(name: str) -> VirtualGPU:
    """The GPU called `name`, whatever its case, spaces and dashes ("rtx 4090", "a100-80gb"), or a part of one name.

    Raises BadInputError for an unknown name and for a part of several, which it lists.
    """
    wanted = _plain(name)
    for known, gpu in KNOWN_GPUS.items():
        if wanted in (_plain(known), _plain(gpu.name)):
            return gpu
    alike = [known for known in KNOWN_GPUS if len(wanted) > 1 and wanted in _plain(known)]
    if len(alike) == 1:
        return KNOWN_GPUS[alike[0]]
    if alike:
        raise BadInputError(f"{name[:40]!r} may be one of several GPUs: choose {' or '.join(alike)}.")
    raise BadInputError(f"no GPU called {name[:40]!r} is known: choose one that `stalloc info` lists.")


_UNITS = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1024))
}


def parse_memory(text: str | int, *, at_least: int = 1) -> int:
    """Bytes from "24GiB", "80GB", "512 MiB", "24g" (binary, as torch's tools mean it) or a plain number.

    Raises BadInputError for anything else and for less than `at_least` bytes.
    """
    match, num_bytes = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text)), -1
    if match and (unit := _UNITS.get(match[2].lower())) and len(match[1]) <= _MAX_DIGITS:
        num_bytes = int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)
    if not at_least <= num_bytes <= _MAX_BYTES:
        shown = f"{str(text)[:40]!r}{'…' if len(str(text)) > 40 else ''}"
        raise BadInputError(f"{shown} is not an amount of memory: write bytes, or a number with MiB, GiB, MB or GB.")
    return num_bytes


def memory_option(option: str, text: str) -> int:
    """Bytes of an option. Raises BadInputError for a small number without a unit, such as 24."""
    number = text[:30]
    if text.isascii() and text.isdigit() and 0 < int(number) < 1 << 20:
        raise BadInputError(f"{option} is {number} without a unit: give {number}GiB, {number}MiB or {number}B.")
    try:
        return parse_memory(text)
    except BadInputError as error:
        raise BadInputError(f"{option}: {error}") from None


# What a process takes on a GPU beside its allocators: the CUDA context with the kernels it loads, and NCCL's buffers.
# No figure of allocated or reserved memory counts it, native ones included; where it matters it is a row of its own,
# with where it is from. cuBLAS's and cuDNN's workspaces are allocations of the program, and counted as such.
ASSUMED_BYTES = 512 << 20

#: What is known of it. The last two are the memory of the card less what a recording says was reserved and free when it
#: ran out of memory; the card's memory is known to within 1 %, and nobody wrote down what else ran there.
CONTEXT_SOURCE = (
    "an assumption; PyTorch's maintainers speak of 300 to 400 MiB (issues 107667 and 109888), recordings of errors "
    "leave room for 0.8 GiB, and for 1.1 to 1.3 GiB with NCCL on 4 GPUs"
)


@dataclass(frozen=True, kw_only=True)
class Context:
    """The CUDA context of one process on one card, with the kernels that it loads."""

    least_bytes: int
    most_bytes: int
    source: str


_ANY_CONTEXT = Context(
    least_bytes=300 << 20,
    most_bytes=819 << 20,
    source="no figure of this card is known: PyTorch's maintainers speak of 300 to 400 MiB (pytorch#107667, "
    "pytorch#109888), and recordings of errors leave room for 0.8 GiB",
)
# What nvidia-smi showed of a process with hardly an allocation, as others published it. Kernels come as they are first
# called, so a program that does more has more: up to what is known of any card.
_CONTEXTS = {
    "RTX-6000-Ada": (426, "nvidia-smi with PyTorch 2.10 and CUDA 13.0 (unslothai/unsloth-zoo#1053)"),
    "RTX-3090": (484, "nvidia-smi with CUDA 13.0 and NCCL's kernels (NVIDIA/nccl#2366)"),
}


def context_of(card: str) -> Context:
    """What is known of a card, by its name in `known_gpus`."""
    if card not in _CONTEXTS:
        return _ANY_CONTEXT
    mib, source = _CONTEXTS[card]
    return Context(
        least_bytes=mib << 20, most_bytes=_ANY_CONTEXT.most_bytes, source=f"at least what was seen: {source}"
    )
