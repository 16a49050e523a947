"""The parts that the parameters of an optimizer are updated in, and the room that tensors take in the host.

Contract: what is executed and what foresees it ask here, so they agree. This module loads no torch.
"""

ALIGNED_BYTES = 512  #: at which tensors begin in a block of the host; torch counts so on the device too


def aligned(size_bytes: int) -> int:
    """The room that so many bytes take."""
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def part_bytes(window_bytes: int) -> int:
    """How many bytes of parameters make a part: with two tensors of state each, some three parts fill the window."""
    return max(window_bytes // 6, 1)


def divided(sizes: list[int], most_bytes: int) -> list[list[int]]:
    """Places of sizes in a row, in parts whose sum is at most so much; a larger one is a part of its own."""
    parts: list[list[int]] = []
    sum_bytes = 0
    for place, size_bytes in enumerate(sizes):
        if not parts or sum_bytes + aligned(size_bytes) > most_bytes:
            parts.append([])
            sum_bytes = 0
        parts[-1].append(place)
        sum_bytes += aligned(size_bytes)
    return parts
