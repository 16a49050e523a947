"""A run whose saved activations go to the host in part, foreseen from one in which all of them do, each at once.

Contract: nothing is modelled that was not seen. In the recorded run memory leaves as soon as it is saved, unless
somebody else holds it, and comes back when it is needed; so the run shows how long others hold what is saved, and how
long backward does. All else that a ratio and a window change is decided by the code that runs use (`OffloadOrder`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from stalloc.cost.queues import Queue, Task, schedule
from stalloc.fitting.foreseen_tiers import Lifespans
from stalloc.techniques.activation_settings import ActivationSettings
from stalloc.techniques.offload_order import OffloadOrder
from stalloc.techniques.parts import aligned


class Kind(IntEnum):
    SAVED = 0
    NEEDED = 1
    GONE = 2


@dataclass(frozen=True)
class ActivationsRecorded:
    """What a run saved: events (moment, kind, number), and the facts of each activation, by its number."""

    events: list[tuple[float, int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  #: bytes
    requests: list[int] = field(default_factory=list)  #: that held each; -1: no request did
    returns: list[int] = field(default_factory=list)  #: requests that held each once it was back; -1: it never left


class _Does(IntEnum):
    COPY_OUT = 0
    LET_GO = 1
    BRING = 2
    USE = 3
    FORGET = 4


def _actions(recorded: ActivationsRecorded, settings: ActivationSettings) -> Iterator[tuple[float, _Does, int]]:
    """What a run with these settings does with its activations, in order: moment, what, and number."""
    order = OffloadOrder(settings.ratio, settings.window_bytes)
    away: set[int] = set()
    for moment, kind, number in recorded.events:
        if kind == Kind.SAVED:
            if order.is_wanted(recorded.sizes[number]):
                yield moment, _Does.COPY_OUT, number
                for one in order.leaves(number, recorded.sizes[number]):
                    away.add(one)
                    yield moment, _Does.LET_GO, one
        elif kind == Kind.NEEDED:
            for one in order.needed(number):
                if one in away:
                    away.remove(one)
                    yield moment, _Does.BRING, one
            yield moment, _Does.USE, number
        else:
            order.gone(number)
            yield moment, _Does.FORGET, number


@dataclass(frozen=True)
class Offloaded:
    """A run that offloads activations: the lifespans of its requests, and the most bytes in the host at once."""

    lifespans: Lifespans
    host_bytes: int


def offloaded(run: Lifespans, recorded: ActivationsRecorded, settings: ActivationSettings) -> Offloaded:
    """The requests of the recorded run as they would have been; requests that would not be made have size 0."""
    let_go: dict[int, int] = {}
    brought: dict[int, int] = {}
    copied: set[int] = set()
    held: Counter[int] = Counter()  # places in the host by size, and those of them that are in use
    used: Counter[int] = Counter()
    for moment, does, number in _actions(recorded, settings):
        place_bytes = aligned(recorded.sizes[number])
        if does == _Does.COPY_OUT:
            copied.add(number)
            used[place_bytes] += 1
            held[place_bytes] = max(held[place_bytes], used[place_bytes])
        elif does == _Does.LET_GO:
            let_go[number] = int(moment)
        elif does == _Does.BRING:
            brought[number] = int(moment)
        elif does == _Does.FORGET and number in copied:
            used[place_bytes] -= 1
    start, end, size = (column.copy() for column in run)
    gone = {number: int(moment) for moment, kind, number in recorded.events if kind == Kind.GONE}
    for number, (row, back) in enumerate(zip(recorded.requests, recorded.returns, strict=True)):
        if row < 0:
            continue
        held_until = int(run[1][row])  # by others
        needed_until = int(end[back]) if back >= 0 else max(gone.get(number, 0), held_until)
        stays = number not in let_go or (number in brought and held_until > brought[number])
        end[row] = max(end[row], needed_until if stays else let_go[number])
        if back >= 0 and (stays or number not in brought):
            size[back] = 0
        elif back >= 0:
            start[back] = min(start[back], brought[number])
    return Offloaded((start, end, size), sum(place_bytes * count for place_bytes, count in held.items()))


def added_seconds(
    recorded: ActivationsRecorded,
    settings: ActivationSettings,
    step_seconds: float,
    bytes_per_second: float,
    start_seconds: float,
) -> float:
    """The seconds by which waiting for copies lengthens a step, whose moments in `recorded` are in seconds."""
    tasks = [Task("compute", Queue.COMPUTE, 0.0)]
    computed, now = 0, 0.0
    waits: set[int] = set()
    copy_out: dict[int, int] = {}
    copy_back: dict[int, int] = {}

    def compute(moment: float) -> None:
        nonlocal computed, now
        if moment > now or waits:
            computed = len(tasks)
            tasks.append(Task("compute", Queue.COMPUTE, max(0.0, moment - now), tuple(waits)))
            now = max(now, moment)
            waits.clear()

    for moment, does, number in _actions(recorded, settings):
        compute(moment)
        seconds = recorded.sizes[number] / bytes_per_second + start_seconds
        if does == _Does.COPY_OUT:
            copy_out[number] = len(tasks)
            tasks.append(Task("save", Queue.TO_HOST, seconds, (computed,)))
        elif does == _Does.LET_GO:
            waits.add(copy_out[number])
        elif does == _Does.BRING:
            copy_back[number] = len(tasks)
            tasks.append(Task("bring", Queue.TO_DEVICE, seconds, (computed, copy_out[number])))
        elif does == _Does.USE and number in copy_back:
            waits.add(copy_back[number])
    compute(max(now, step_seconds))
    return max(0.0, schedule(tasks).seconds - step_seconds)
