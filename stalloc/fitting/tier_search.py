"""Ways to run a program with a part of it in host memory, or on disk, added to those of a fit.

Contract: nothing is tried where recomputation costs less time. The optimizer's state goes first, with as much of it on
the device as the budget leaves room for. Updates on the processor, which round differently, are tried only if asked
for by name.
"""

import dataclasses

from stalloc.cost import host_rates
from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START
from stalloc.cost.layer_costs import LayerCost, LinkCost
from stalloc.cost.stream_window import smallest_window
from stalloc.errors import BadInputError
from stalloc.fitting.fit_record import Candidate
from stalloc.fitting.frontier import proposal, whole_blocks
from stalloc.fitting.observation import ProgramSeen
from stalloc.fitting.proposals import Base, Known, Proposals, Way
from stalloc.fitting.recompute_search import cheapest
from stalloc.fitting.trials import Measured
from stalloc.techniques.parts import Shares
from stalloc.techniques.technique_settings import TechniqueSettings
from stalloc.techniques.tier_settings import TierSettings

BY_THE_PROCESSOR = ("zero-offload", "twin-flow", "stronghold")
_LAYERS = ("l2l", "stronghold")  # stream layers whatever fits without
POLICIES = ("page", "zero-infinity", "l2l", *BY_THE_PROCESSOR)  #: names of what is tried here
WINDOWS = (512 << 20, 128 << 20, 1)  #: of optimizer state on the device at once; 1: a part at a time, nothing ahead
_FRACTIONS = 16  # of the state, that are tried to stay on the device
_FLOAT_BYTES = 4


def in_tiers(known: Known, as_it_is: Base, policy: str | None = None) -> Proposals:
    """Run the program with its optimizer's state elsewhere, and layers streamed, as far as the budget asks for it.
    Blocks are recomputed beside that where it is needed. `as_it_is` is the program with no other technique; `policy` is
    one of POLICIES, where only that is to be tried."""
    name = (policy or "page").partition(":")[0]
    if not known.host_bytes:
        yield "nothing is kept in host memory without --host SIZE"
        return None
    if name == "zero-infinity" and not known.disk_bytes:
        yield "nothing is kept on disk without --disk FOLDER:SIZE"
        return None
    if name in _LAYERS and not whole_blocks(known.step):
        return None
    streamed = _windows(known, as_it_is)
    ways: dict[str, list[tuple[int, ...]]] = {"l2l": [(1,)], "stronghold": [tuple(streamed)]}
    for windows in ways.get(name, [(0, *streamed), (0,)]):  # what cannot stream its layers may page its state
        base = _with_tiers(as_it_is, _widest(known, as_it_is, windows, policy or "page"))
        tiers = base.settings.tiers
        first: Candidate = yield Way(base, proposal(known.step, {}), what_of(tiers), name)
        if not first.refused or not tiers.streamed_window:
            break
        yield f"layers are not streamed: with parameters in the host between passes {first.refused}"
    if not first.refused and known.fits(first):
        if name not in _LAYERS:
            yield from _keep_some(known, base, name, 1 - processor_share(policy or "page"))
    elif not first.refused and whole_blocks(known.step):
        yield from cheapest(known, dataclasses.replace(base, alone=first))
    return None


def _with_tiers(as_it_is: Base, tiers: TierSettings) -> Base:
    return Base(TechniqueSettings(tiers=tiers), as_it_is.foresight)


def is_of_tiers(policy: str | None) -> bool:
    return policy is not None and policy.partition(":")[0] in POLICIES


def processor_share(policy: str) -> float:
    """The share of parameters that the processor updates: `twin-flow:SHARE`. Raises BadInputError for a bad share."""
    name, _, text = policy.partition(":")
    if name != "twin-flow":
        if text:
            raise BadInputError(f"{name} takes no number: give --policy {name}.")
        return 1.0 if name in ("zero-offload", "stronghold") else 0.0
    try:
        share = float(text or 0.5)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise BadInputError(f"twin-flow:{text[:20]} is no share of the parameters: give one above 0, up to 1.")
    return share


def _keep_some(known: Known, base: Base, name: str, most: float) -> Proposals:
    """Keep as much state on the device as the budget leaves room for: the ratio of Twin-Flow, solved."""
    nothing, kept = proposal(known.step, {}), base
    for number in range(1, _FRACTIONS + (most < 1)):  # all of it is the program as it is
        more = _with_tiers(base, dataclasses.replace(base.settings.tiers, device_share=most * number / _FRACTIONS))
        if not 0 < more.expected_bytes(known.step, nothing) <= known.budget_bytes:
            break
        kept = more
    if kept is not base:
        yield Way(kept, nothing, what_of(kept.settings.tiers), name)
    return None


def _widest(known: Known, as_it_is: Base, streamed_windows: tuple[int, ...], policy: str) -> TierSettings:
    """The first tiers with which some recomputation is expected to fit, else those that need least. Gradients that
    leave are expected to stay, so it may need less."""
    name, least = policy.partition(":")[0], proposal(known.step, whole_blocks(known.step))
    ways = [
        TierSettings(
            host_bytes=known.host_bytes,
            disk_bytes=known.disk_bytes,
            paged_window_bytes=window_bytes,
            streamed_window=streamed,
            processor_share=processor_share(policy),
            sends_gradients=name in (*_LAYERS, *BY_THE_PROCESSOR),
            updates_beside_backward=name == "stronghold",
        )
        for streamed in (streamed_windows if least.choices else (0,))
        for window_bytes in WINDOWS
    ]
    needed = []
    for tiers in ways:
        needed.append(_with_tiers(as_it_is, tiers).expected_bytes(known.step, least))
        if 0 < needed[-1] <= known.budget_bytes:
            return tiers
    return ways[needed.index(min(needed))]


def _windows(known: Known, as_it_is: Base) -> list[int]:
    """Numbers of layers to hold on the device at once: the fewest that are never waited for (STRONGHOLD), 2, and 1. Of
    a block its forward pass is estimated; its backward pass is taken to be twice that at the least."""
    sizes = as_it_is.foresight.layer_bytes if as_it_is.foresight else {}
    seconds = {row: sum(one.seconds for one in known.step.blocks[row].operations) for row in sizes}
    layers = [LayerCost(sizes[row], 0, 0, seconds[row], seconds[row]) for row in sorted(sizes)]
    unstalled = smallest_window(layers, LinkCost(known.link_bytes_per_second))
    return sorted({unstalled, 2, 1} - {0}, reverse=True)


def what_of(tiers: TierSettings) -> str:
    done, paged_share = list[str](), 1 - tiers.processor_share - tiers.device_share
    if tiers.processor_share:
        beside = " beside backward" * tiers.updates_beside_backward
        done.append(f"update {100 * tiers.processor_share:.0f} % on the processor{beside}")
    if tiers.processor_share + tiers.device_share < 1:
        some = f"{100 * paged_share:.0f} % of " * (tiers.shares != Shares())
        done.append(f"page {some}optimizer state")
    return ", ".join([*done, *["stream layers"] * (tiers.streamed_window > 0)])


def with_host(known: Known, base: Base, candidate: Candidate, recorded: Measured) -> Candidate:
    """A candidate with the host memory and disk that a recorded run took, and the estimated seconds of its copies."""
    tiers, step, offload = base.settings.tiers, known.step, base.offload
    found = {name: getattr(recorded, name) for name in ("native_bytes", "host_bytes", "disk_bytes")}
    candidate = dataclasses.replace(candidate, **found)
    if not tiers and offload is None:
        return candidate
    missing = ""
    if tiers and not recorded.num_paged:
        missing = "no optimizer was made"
    elif tiers.processor_share and not recorded.processor_bytes:
        missing = "there is no room in host memory for what the processor needs"
    if missing:
        return dataclasses.replace(candidate, refused=next(iter(recorded.notes), missing))
    added = candidate.added_seconds + (0.0 if offload is None else offload.seconds)
    if tiers:
        added += tier_seconds(tiers, recorded, step, known.link_bytes_per_second)
    factor = 1 + added / step.step_seconds if step.step_seconds else 1.0
    said = candidate.technique in (*POLICIES, "offload-ratio")
    what = candidate.what if said else f"{candidate.what}, {what_of(tiers)}"
    return dataclasses.replace(candidate, added_seconds=added, factor=factor, what=what)


def tier_seconds(tiers: TierSettings, trial: Measured, step: ProgramSeen, link_bytes_per_second: float) -> float:
    """What state, parameters and gradients that come and go add to a step, estimated of what a trial has seen.

    Both directions of the link, the disk and the processor work at once where there is a window for it, else one after
    the other; what the optimizer saves on the device is not counted.
    State on disk is read and written once a step. Layers come for each pass, while the one before computes where there
    is a window, and for their update on the device, from which they go back; those on disk come through the host, as
    quickly as the slower of both is. Of what the processor updates gradients go to the host, and parameters that are
    not streamed both ways. Gradients that leave in backward come back for an update on the device. What is copied, or
    updated, beside backward is not taken to be hidden there.
    """
    rate = LINK_SHARE * link_bytes_per_second
    read_rate, write_rate = host_rates.DISK_READ_BYTES_PER_SECOND, host_rates.DISK_WRITE_BYTES_PER_SECOND
    disk = trial.disk_state_bytes * (1 / read_rate + 1 / write_rate)
    resident_bytes = trial.processor_bytes - trial.processor_streamed_bytes
    to_host = (trial.paged_bytes + trial.processor_bytes + resident_bytes) / rate
    to_device = (trial.paged_bytes + resident_bytes) / rate
    processor = trial.processor_bytes / _FLOAT_BYTES / host_rates.ADAM_PARAMETERS_PER_SECOND
    if tiers.paged_window_bytes > 1 or not trial.paged_bytes:  # the processor has a window of its own
        seconds = max(to_host, to_device, disk, processor) + LINK_START
    else:
        seconds = to_host + to_device + disk + processor + 2 * LINK_START
    if trial.streamed_bytes:
        num_passes = 2 * max(1, len(step.calls) // max(1, len({call.block for call in step.calls})))
        from_disk = trial.disk_streamed_bytes / min(rate, read_rate)
        passes = num_passes * ((trial.streamed_bytes - trial.disk_streamed_bytes) / rate + from_disk)
        seconds += passes if tiers.streamed_window == 1 else max(0.0, passes - step.step_seconds)
        on_device_bytes = trial.streamed_bytes - trial.processor_streamed_bytes
        seconds += on_device_bytes * (1 + tiers.sends_gradients) / rate
        seconds += from_disk + trial.disk_streamed_bytes / write_rate
    return seconds
