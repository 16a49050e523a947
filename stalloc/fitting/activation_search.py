"""Ways to run a program with a share of what it saves for backward in host memory, added to those of a fit.

Contract: a way is run only if it is expected to cost less than every other that fits, or if none fits so far. The share
is the least that is expected to keep the budget, the window the one with the shortest waits for copies.
"""

import dataclasses
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.fitting.fit_record import Candidate
from stalloc.fitting.foreseen_host import ActivationsRecorded, added_seconds, offloaded, paged, peak_bytes
from stalloc.fitting.frontier import Proposal, proposal, whole_blocks
from stalloc.fitting.proposals import Base, Known, Offloaded, Proposals, Wanted, Way
from stalloc.fitting.recompute_search import ENOUGH_LEFT
from stalloc.fitting.run_seen import RunSeen
from stalloc.fitting.tier_search import WINDOWS, tier_seconds, what_of
from stalloc.fitting.trials import Measured, TrialWork
from stalloc.techniques.activation_settings import ActivationSettings
from stalloc.techniques.technique_settings import TechniqueSettings
from stalloc.techniques.tier_settings import TierSettings

RATIOS = tuple(step / 20 for step in range(1, 21))
ACTIVATION_WINDOWS = (512 << 20, 128 << 20, 32 << 20, 0)  #: bytes on their way at once
ROUNDS = 3
_ENOUGH = 1.01  # times the least peak that a share can reach: waiting less for copies is worth that much
_PLENTY = 1 << 50  # of host memory, in a run that only foresees


@dataclass(frozen=True)
class _Expected:
    settings: TechniqueSettings
    offload: Offloaded
    seconds_beside: float  #: that other techniques add to a step


@dataclass(frozen=True)
class _Seen:
    """What is known of the program with some blocks recomputed, from which its offloading is foreseen."""

    proposed: Proposal
    run: RunSeen
    timed: ActivationsRecorded
    step_seconds: float


def with_activations(known: Known, policy: str | None = None) -> Proposals:
    """Run the program with activations in host memory, beside recomputed blocks, paged state and streamed layers.
    `policy` "offload-ratio:R": only with this ratio, and with nothing beside. Raises BadInputError if R is none."""
    ratio = ratio_of(policy or "")
    if not known.host_bytes:
        yield "nothing is kept in host memory without --host SIZE"
        return None
    if ratio is not None:
        seen = yield from _look(known, proposal(known.step, {}))
        if seen is not None:
            ways = [_expected(known, seen, TierSettings(), ratio, window) for window in ACTIVATION_WINDOWS]
            enough = min(one.offload.peak_bytes for one in ways) * _ENOUGH
            quick = min((one for one in ways if one.offload.peak_bytes <= enough), key=lambda one: one.offload.seconds)
            yield _way(seen, quick)
        return None
    as_is = known.candidates[0]
    allowance = max(0, as_is.needed_bytes - as_is.expected_bytes) if as_is.expected_bytes else 0
    seen, num_before = None, len(known.candidates)
    for again in (False, True):
        whole = whole_blocks(known.step) if again else {}
        if again and not whole:
            continue
        seen = (yield from _look(known, proposal(known.step, whole))) or seen
        if seen is None or len(seen.proposed.choices) < len(whole):
            continue
        target_bytes = known.budget_bytes - allowance
        for tiers in _tiers(known, seen):
            least = _expected(known, seen, tiers, 0.0, 0).offload.peak_bytes if again or tiers else target_bytes + 1
            if least <= target_bytes or (yield from _approach(known, seen, tiers, target_bytes)):
                break
    if policy is not None and seen is not None and len(known.candidates) == num_before:
        yield _way(seen, _expected(known, seen, TierSettings(), 1.0, 0))  # the least that it can reach
    return None


def _tiers(known: Known, seen: _Seen) -> Iterator[TierSettings]:
    yield TierSettings()
    for streamed in (0, 2, 1) if seen.proposed.choices else (0,):
        for window in WINDOWS:
            yield TierSettings(host_bytes=known.host_bytes, paged_window_bytes=window, streamed_window=streamed)


def _look(known: Known, proposed: Proposal) -> Generator[Wanted, Any, _Seen | None]:
    """Record a run in which every saved tensor leaves at once, and estimate when each is saved and needed."""
    leaving = Base(TechniqueSettings(activations=ActivationSettings(ratio=1.0, host_bytes=_PLENTY)))
    recorded: Measured = yield known.recorded(leaving.with_blocks(known.step, proposed))
    timed: Measured = yield TrialWork("timed", Base().with_blocks(known.step, proposed))
    failure = recorded.failure or timed.failure
    if not failure and not recorded.offloaded_bytes:
        failure = "nothing that it saves is large enough, and of a kind that can leave"
    if failure:
        yield f"activations are not kept in host memory: {failure.rstrip('.')}"
        return None
    run, step = RunSeen.from_json(recorded.seen), timed.seen
    return _Seen(proposed, run, ActivationsRecorded(*step["activations"]), step["step_seconds"])


def _approach(known: Known, seen: _Seen, tiers: TierSettings, target_bytes: int) -> Generator[Wanted, Any, bool]:
    """Run what is expected to fit, then aim lower by as much as it missed; whether there is nothing more to try."""
    for _ in range(ROUNDS):
        found = _cheapest(known, seen, tiers, target_bytes)
        least_seconds = min((one.added_seconds for one in known.candidates if known.fits(one)), default=float("inf"))
        if found is None or found.offload.seconds + found.seconds_beside >= least_seconds:
            return False
        candidate: Candidate = yield _way(seen, found)
        if known.fits(candidate) or (candidate.refused and not candidate.runs_short):
            return True
        target_bytes -= max(candidate.needed_bytes - known.budget_bytes, int(known.budget_bytes * ENOUGH_LEFT))
    return False


def _way(seen: _Seen, found: _Expected) -> Way:
    activations, num_blocks = found.settings.activations, len(seen.proposed.choices)
    of = "" if activations.ratio == 1 else f"{activations.ratio:.0%} of "
    ahead = f", {human_bytes(activations.window_bytes)} ahead" if activations.window_bytes else ""
    what = [f"recompute {plural(num_blocks, 'whole block')}"] if num_blocks else []
    what += [f"{of}activations to the host{ahead}", *([what_of(found.settings.tiers)] if found.settings.tiers else [])]
    return Way(Base(found.settings, offload=found.offload), seen.proposed, ", ".join(what), "offload-ratio")


def ratio_of(policy: str) -> float | None:
    """The share in `offload-ratio:SHARE`, None without one. Raises BadInputError if it is none."""
    _, colon, text = policy.partition(":")
    if not colon:
        return None
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 < ratio <= 1:
        raise BadInputError(f"there is no share {text[:20]!r} of activations: give offload-ratio:0.5, for example.")
    return ratio


def _cheapest(known: Known, seen: _Seen, tiers: TierSettings, target_bytes: int) -> _Expected | None:
    """What adds least to a step, given for each window the least share that is expected to fit; None if none fits."""
    found = []
    for window in ACTIVATION_WINDOWS:
        low, high = 0, len(RATIOS)  # the first that fits lies in [low, high]
        fitting_one = None
        while low < high:
            middle = (low + high) // 2
            one = _expected(known, seen, tiers, RATIOS[middle], window)
            if one.offload.peak_bytes <= target_bytes:
                fitting_one, high = one, middle
            else:
                low = middle + 1
        if fitting_one is not None and fitting_one.offload.host_bytes <= known.host_bytes:
            found.append(fitting_one)
    return min(found, key=lambda one: (one.offload.seconds, one.offload.host_bytes), default=None)


def _expected(known: Known, seen: _Seen, tiers: TierSettings, ratio: float, window: int) -> _Expected:
    settings = ActivationSettings(ratio=ratio, window_bytes=window, host_bytes=known.host_bytes)
    run = seen.run
    found = offloaded((run.start, run.end, run.size), run.activations, settings)
    lifespans, beside = found.lifespans, 0.0
    if tiers:
        left = dataclasses.replace(tiers, host_bytes=max(0, known.host_bytes - found.host_bytes))
        in_host = paged(lifespans, run.updates, left, run.layers, run.passes)
        lifespans = in_host.lifespans
        layers, on_disk = run.layers if tiers.streamed_window else (), in_host.disk_streamed_bytes
        streamed = sum(int(run.size[row]) for layer in layers for row in layer.requests)
        paged_bytes = max(0, in_host.host_bytes - streamed + on_disk)
        moved = Measured(paged_bytes=paged_bytes, streamed_bytes=streamed, disk_streamed_bytes=on_disk)
        beside = tier_seconds(tiers, moved, known.step, known.link_bytes_per_second)
    rate = LINK_SHARE * known.link_bytes_per_second
    seconds = added_seconds(seen.timed, settings, seen.step_seconds, rate, LINK_START)
    whole = TechniqueSettings(tiers=tiers, activations=settings)
    return _Expected(whole, Offloaded(peak_bytes(lifespans), found.host_bytes, seconds), seen.proposed.seconds + beside)
