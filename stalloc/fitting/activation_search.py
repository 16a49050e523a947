"""Ways to run a program with a share of what it saves for backward in host memory, added to those of a fit.

Contract: a way is run only if it is expected to cost less than every other that fits, or if none fits so far; the share
is the least with which the budget is expected to be kept, the window the one with which copies are waited for least.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.fitting.fit_record import Candidate
from stalloc.fitting.foreseen_activations import ActivationsRecorded, added_seconds, from_rows, offloaded
from stalloc.fitting.foreseen_paging import paged, peak_bytes
from stalloc.fitting.frontier import Proposal, proposal, whole_blocks
from stalloc.fitting.recompute_search import ENOUGH_LEFT
from stalloc.fitting.run_seen import RunSeen
from stalloc.fitting.tier_search import WINDOWS, what_of
from stalloc.fitting.tier_seconds import tier_seconds
from stalloc.fitting.trial_work import TrialWork
from stalloc.fitting.trials import Measured
from stalloc.techniques.activation_settings import ActivationSettings
from stalloc.techniques.technique_settings import TechniqueSettings
from stalloc.techniques.tier_settings import TierSettings

if TYPE_CHECKING:
    from stalloc.fitting.candidates import Fitting

RATIOS = tuple(step / 20 for step in range(1, 21))
ACTIVATION_WINDOWS = (512 << 20, 128 << 20, 32 << 20, 0)  #: bytes on their way at once
ROUNDS = 3
_ENOUGH = 1.01  # of the least peak that a share can reach, for which copies need not be waited for as long
_PLENTY = 1 << 50  # of host memory, in a run that only foresees


@dataclass(frozen=True)
class Expected:
    """What is foreseen of a way to run the program."""

    settings: TechniqueSettings
    peak_bytes: int
    host_bytes: int  #: of activations
    seconds: float  #: that copies of activations add to a step
    seconds_beside: float  #: that what else is done adds


@dataclass(frozen=True)
class _Seen:
    """What is known of the program with some blocks recomputed, from which its offloading is foreseen."""

    proposed: Proposal
    run: RunSeen
    timed: ActivationsRecorded
    step_seconds: float


def try_activations(fitting: "Fitting", policy: str | None = None) -> None:
    """Run the program so, beside blocks that are recomputed, state that is paged and layers that are streamed.

    `policy` "offload-ratio:R": only with this ratio, and with nothing beside. Raises BadInputError if R is none.
    """
    ratio = ratio_of(policy or "")
    if not fitting.host_bytes:
        fitting.note(["nothing is kept in host memory without --host SIZE"])
        return
    if ratio is not None:
        seen = _look(fitting, proposal(fitting.step, {}))
        if seen is not None:
            ways = [_expected(fitting, seen, TierSettings(), ratio, window) for window in ACTIVATION_WINDOWS]
            enough = min(one.peak_bytes for one in ways) * _ENOUGH
            _measure(fitting, seen, min((one for one in ways if one.peak_bytes <= enough), key=lambda one: one.seconds))
        return
    as_is = fitting.candidates[0]
    allowance = max(0, as_is.needed_bytes - as_is.expected_bytes) if as_is.expected_bytes else 0
    seen, num_before = None, len(fitting.candidates)
    for again in (False, True):
        whole = whole_blocks(fitting.step) if again else {}
        if again and not whole:
            continue
        seen = _look(fitting, proposal(fitting.step, whole)) or seen
        if seen is None or len(seen.proposed.choices) < len(whole):
            continue
        target_bytes = fitting.budget_bytes - allowance
        for tiers in _tiers(fitting, seen):
            fits_without = (again or tiers) and _expected(fitting, seen, tiers, 0.0, 0).peak_bytes <= target_bytes
            if fits_without or _approach(fitting, seen, tiers, target_bytes):
                break
    if policy is not None and seen is not None and len(fitting.candidates) == num_before:
        _measure(fitting, seen, _expected(fitting, seen, TierSettings(), 1.0, 0))  # the least that it can reach


def _tiers(fitting: "Fitting", seen: _Seen) -> Iterator[TierSettings]:
    yield TierSettings()
    for streamed in (0, 2, 1) if seen.proposed.choices else (0,):
        for window in WINDOWS:
            yield TierSettings(host_bytes=fitting.host_bytes, paged_window_bytes=window, streamed_window=streamed)


def _look(fitting: "Fitting", proposed: Proposal) -> _Seen | None:
    """Record a run in which all that is saved leaves at once, and estimate when it is saved and needed."""
    fitting.base = TechniqueSettings(activations=ActivationSettings(ratio=1.0, host_bytes=_PLENTY))
    recorded = fitting.watch(fitting.settings_with(proposed))
    fitting.base = TechniqueSettings()
    timed = fitting.try_once(TrialWork("timed", fitting.settings_with(proposed)))
    failure = recorded.failure or timed.failure
    if not failure and not recorded.offloaded_bytes:
        failure = "nothing that it saves is large enough, and of a kind that can leave"
    if failure:
        fitting.note([f"activations are not kept in host memory: {failure.rstrip('.')}"])
        return None
    run, step = RunSeen.from_json(recorded.seen), timed.seen
    return _Seen(proposed, run, from_rows(step["activations"]), step["step_seconds"])


def _approach(fitting: "Fitting", seen: _Seen, tiers: TierSettings, target_bytes: int) -> bool:
    """Run what is expected to fit, then what leaves more by what was too much; whether there is nothing more to try."""
    for _ in range(ROUNDS):
        found = _cheapest(fitting, seen, tiers, target_bytes)
        if found is None or not _is_worth_it(fitting, found):
            return False
        candidate = _measure(fitting, seen, found)
        if candidate.fits(fitting.budget_bytes) or (candidate.refused and not candidate.runs_short):
            return True
        target_bytes -= max(candidate.needed_bytes - fitting.budget_bytes, int(fitting.budget_bytes * ENOUGH_LEFT))
    return False


def _measure(fitting: "Fitting", seen: _Seen, found: Expected) -> Candidate:
    fitting.base, fitting.offload = found.settings, found
    candidate = fitting.measure(seen.proposed, _what(found.settings, len(seen.proposed.choices)), "offload-ratio")
    fitting.base, fitting.offload = TechniqueSettings(), None
    return candidate


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


def _cheapest(fitting: "Fitting", seen: _Seen, tiers: TierSettings, target_bytes: int) -> Expected | None:
    """Of each window the least share that is expected to fit; of those the one that adds least to a step."""
    found = []
    for window in ACTIVATION_WINDOWS:
        low, high = 0, len(RATIOS)  # the first that fits lies in [low, high]
        fitting_one = None
        while low < high:
            middle = (low + high) // 2
            one = _expected(fitting, seen, tiers, RATIOS[middle], window)
            if one is not None and one.peak_bytes <= target_bytes:
                fitting_one, high = one, middle
            else:
                low = middle + 1
        if fitting_one is not None and fitting_one.host_bytes <= fitting.host_bytes:
            found.append(fitting_one)
    return min(found, key=lambda one: (one.seconds, one.host_bytes), default=None)


def _expected(fitting: "Fitting", seen: _Seen, tiers: TierSettings, ratio: float, window: int) -> Expected:
    settings = ActivationSettings(ratio=ratio, window_bytes=window, host_bytes=fitting.host_bytes)
    run = seen.run
    found = offloaded((run.start, run.end, run.size), run.activations, settings)
    lifespans, beside = found.lifespans, 0.0
    if tiers:
        left = dataclasses.replace(tiers, host_bytes=max(0, fitting.host_bytes - found.host_bytes))
        in_host = paged(lifespans, run.updates, left, run.layers, run.passes)
        lifespans = in_host.lifespans
        layers = run.layers if tiers.streamed_window else ()
        streamed_bytes = sum(int(run.size[row]) for layer in layers for row in layer.requests)
        on_disk = in_host.disk_streamed_bytes
        moved = Measured(
            paged_bytes=max(0, in_host.host_bytes - streamed_bytes + on_disk),
            streamed_bytes=streamed_bytes,
            disk_streamed_bytes=on_disk,
        )
        beside = tier_seconds(tiers, moved, fitting.step, fitting.link_bytes_per_second)
    rate = LINK_SHARE * fitting.link_bytes_per_second
    seconds = added_seconds(seen.timed, settings, seen.step_seconds, rate, LINK_START)
    whole = TechniqueSettings(tiers=tiers, activations=settings)
    return Expected(whole, peak_bytes(lifespans), found.host_bytes, seconds, seen.proposed.seconds + beside)


def _is_worth_it(fitting: "Fitting", found: Expected) -> bool:
    """Whether it costs less than all that fits so far."""
    seconds = [one.added_seconds for one in fitting.candidates if one.fits(fitting.budget_bytes)]
    return found.seconds + found.seconds_beside < min(seconds, default=float("inf"))


def _what(settings: TechniqueSettings, num_blocks: int) -> str:
    activations = settings.activations
    parts = [f"recompute {plural(num_blocks, 'whole block')}"] if num_blocks else []
    of = "" if activations.ratio == 1 else f"{activations.ratio:.0%} of "
    parts.append(f"{of}activations to the host")
    if activations.window_bytes:
        parts[-1] += f", {human_bytes(activations.window_bytes)} ahead"
    return ", ".join(parts + ([what_of(settings.tiers)] if settings.tiers else []))
