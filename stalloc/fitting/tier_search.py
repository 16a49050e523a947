"""Ways to run a program with a part of it in host memory, added to those of a fit.

Contract: nothing is tried that recomputation needs less time for; the optimizer's state goes first, with as much of it
on the device at once as the budget leaves room for.
"""

import dataclasses
from typing import TYPE_CHECKING

from stalloc.cost.layer_costs import LayerCost, LinkCost
from stalloc.cost.stream_window import smallest_window
from stalloc.fitting.fit_record import Candidate
from stalloc.fitting.frontier import proposal, whole_blocks
from stalloc.techniques.technique_settings import Settings
from stalloc.techniques.tier_settings import TierSettings

if TYPE_CHECKING:
    from stalloc.fitting.candidates import Fitting
    from stalloc.fitting.run_seen import Foresight
    from stalloc.fitting.trials import Measured

WINDOWS = (512 << 20, 128 << 20, 1)  #: of optimizer state on the device at once; 1: a part at a time, nothing ahead
_LINK_SHARE, _LINK_START = 0.8, 1e-5  # of what the link promises, that copies of pinned memory reach


def try_tiers(fitting: "Fitting", plain: "Foresight | None") -> None:
    """Run the program with its optimizer's state paged, and layers streamed, as far as the budget asks for it.

    Blocks are recomputed beside that where it is needed. `plain` is foreseen of the program with no other technique.
    """
    if not fitting.host_bytes:
        fitting.notes.append("nothing is kept in host memory without --host SIZE")
        return
    fitting.foresight = plain
    for windows in ((0, *_windows(fitting)), (0,)):  # what cannot stream its layers may page its state
        fitting.beside = len(fitting.candidates)
        fitting.base = Settings(tiers=_widest(fitting, windows))
        first = fitting.measure(proposal(fitting.step, {}), _what(fitting.base.tiers), "page")
        if not first.refused or not fitting.base.tiers.streamed_window:
            break
        fitting.note([f"layers are not streamed: with parameters in the host between passes {first.refused}"])
    if not first.refused and not first.fits(fitting.budget_bytes) and whole_blocks(fitting.step):
        fitting.search()


def _widest(fitting: "Fitting", streamed_windows: tuple[int, ...]) -> TierSettings:
    """The first ways in which something is expected to fit, else the one with the least."""
    least = proposal(fitting.step, whole_blocks(fitting.step))
    ways = [
        TierSettings(host_bytes=fitting.host_bytes, paged_window_bytes=window_bytes, streamed_window=streamed)
        for streamed in (streamed_windows if least.choices else (0,))
        for window_bytes in WINDOWS
    ]
    needed = []
    for tiers in ways:
        fitting.base = Settings(tiers=tiers)
        needed.append(fitting.expected(least))
        if 0 < needed[-1] <= fitting.budget_bytes:
            return tiers
    return ways[needed.index(min(needed))]


def _windows(fitting: "Fitting") -> list[int]:
    """Numbers of layers on the device at once: as STRONGHOLD has it, the least that are never waited for; 2, and 1.

    Of a block its forward pass is estimated; its backward pass is taken to be twice that at the least.
    """
    sizes = fitting.foresight.layer_bytes if fitting.foresight else {}
    seconds = {row: sum(one.seconds for one in fitting.step.blocks[row].operations) for row in sizes}
    layers = [LayerCost(sizes[row], 0, 0, seconds[row], seconds[row]) for row in sorted(sizes)]
    unstalled = smallest_window(layers, LinkCost(fitting.link_bytes_per_second))
    return sorted({unstalled, 2, 1} - {0}, reverse=True)


def _what(tiers: TierSettings) -> str:
    return "page optimizer state" + (", stream layers" if tiers.streamed_window else "")


def with_host(fitting: "Fitting", candidate: Candidate, native: "Measured") -> Candidate:
    """A candidate with what was seen of it under PyTorch's allocator, and what its copies take, estimated.

    State goes each way once a step, both ways at once where there is a window. Layers come for each pass, while the one
    before computes where there is a window, and for the update, from which they go back.
    """
    tiers, step = fitting.base.tiers, fitting.step
    candidate = dataclasses.replace(candidate, native_bytes=native.reserved_bytes, host_bytes=native.host_bytes)
    if not tiers:
        return candidate
    if not native.num_paged:
        return dataclasses.replace(candidate, refused=next(iter(native.notes), "no optimizer was made"))
    rate = _LINK_SHARE * fitting.link_bytes_per_second
    ways = 1 if tiers.paged_window_bytes > 1 else 2
    seconds = ways * (candidate.host_bytes / rate + _LINK_START)
    if native.streamed_bytes:
        num_passes = 2 * max(1, len(step.calls) // max(1, len({call.block for call in step.calls})))
        passes = num_passes * native.streamed_bytes / rate
        seconds += passes if tiers.streamed_window == 1 else max(0.0, passes - step.step_seconds)
    added = candidate.added_seconds + seconds
    factor = 1 + added / step.step_seconds if step.step_seconds else 1.0
    what = candidate.what if candidate.technique == "page" else f"{candidate.what}, {_what(tiers)}"
    return dataclasses.replace(candidate, added_seconds=added, factor=factor, what=what)
