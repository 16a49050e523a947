"""What a dry run offers the program: the memory of the card less what the CUDA context and NCCL take."""

import argparse
from dataclasses import dataclass
from typing import Any

from stalloc.cli.program import chosen_gpu
from stalloc.device import DEFAULT_GPU, VirtualGPU
from stalloc.device.context import ASSUMED_BYTES, SOURCE
from stalloc.device.known_gpus import memory_option, shown_with_memory
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.printable import printable


@dataclass(frozen=True)
class Offer:
    """A card and what of its memory is for the program."""

    gpu: VirtualGPU
    headroom_bytes: int

    @property
    def program_bytes(self) -> int:
        """What the program may have."""
        return self.gpu.total_bytes - self.headroom_bytes

    @property
    def headroom_source(self) -> str:
        """Where the headroom is from."""
        return SOURCE if self.headroom_bytes == ASSUMED_BYTES else "--headroom"

    def as_json(self) -> dict[str, Any]:
        """The keys that every dry run's JSON has."""
        return {
            "gpu": self.gpu.name,
            "memory_bytes": self.gpu.total_bytes,
            "headroom_bytes": self.headroom_bytes,
            "headroom_source": self.headroom_source,
        }

    def title(self) -> str:
        """The first line of a report."""
        name = shown_with_memory("virtual", printable(self.gpu.name), self.gpu.total_bytes)
        headroom = human_bytes(self.headroom_bytes)
        kept = f", {headroom} for the CUDA context and NCCL" if self.headroom_bytes else ""
        return f"{name}: {human_bytes(self.program_bytes)} for the program{kept}"


def add_headroom_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--headroom SIZE`."""
    parser.add_argument(
        "--headroom",
        default=f"{ASSUMED_BYTES >> 20}MiB",
        metavar="SIZE",
        help="memory set aside for the CUDA context and NCCL, which no allocator counts (default: 512MiB)",
    )


def headroom_of(args: argparse.Namespace) -> int:
    """Bytes of --headroom, which may be none."""
    return memory_option("--headroom", args.headroom) if args.headroom != "0" else 0


def offer_of(args: argparse.Namespace) -> Offer:
    """What the options say. Raises BadInputError where nothing is left for the program."""
    made = Offer(chosen_gpu(args) or DEFAULT_GPU, headroom_of(args))
    if made.program_bytes <= 0:
        raise BadInputError(f"a headroom of {args.headroom} leaves nothing of {made.gpu.name}: give less.")
    return made
