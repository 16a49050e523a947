"""Who holds memory at one moment of a trace: by call site, class, role, module and size, and as a tree of stacks.

Contract: the bytes of every list, and those at the root of the tree, add up to what is allocated at that moment, with
sizes rounded up to 512 bytes, a request from its alloc to its free_completed. What grows from step to step is told by
call site where steps are marked, or where the requests repeat exactly.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stalloc.analysis.moments import allocated_peak, asked_by, event_at, is_oom, last_oom, live_rows
from stalloc.columns import Column
from stalloc.figures import human_bytes
from stalloc.lifespans import LifespanClass, classify, find_step_period, fold, module_of_requests, sequence_rows
from stalloc.lifespans.periods import TINY_BYTES
from stalloc.lifespans.roles import path_of
from stalloc.printable import printable
from stalloc.trace import MARK_PHASE_END, MARK_STEP, Trace
from stalloc.trace.operations import Operations, Role, read_operations
from stalloc.trace.sites import UNKNOWN, Frame, is_python, of_stacks, read_sites, site_name, user_frames


def class_keys(trace: Trace, rows: Column) -> list[Hashable]:
    """The lower-case name of the lifespan class."""
    step = find_step_period(trace)
    lifespan = classify(trace, fold(trace, period=step) if step else None).lifespan
    names = {int(one): one.name.lower() for one in LifespanClass}
    return [names[value] for value in lifespan[rows].tolist()]


def site_keys(trace: Trace, rows: Column) -> list[Hashable]:
    """The innermost frame of the user, or the name of the stack where there is no Python."""

    def key(stack: list[Frame]) -> Hashable:
        frames = user_frames(stack)
        return frames[0] if frames and is_python(frames[0]) else site_name(stack)

    return of_stacks(trace, rows, key, UNKNOWN)


def role_keys(operations: Operations, rows: Column) -> list[Hashable]:
    """The role of each request, as people read it."""
    return [Role(value).text for value in operations.role[rows].tolist()]


def module_keys(operations: Operations, rows: Column) -> list[Hashable]:
    """Where the module is that made a request, the same for all that repeat: `layers.*.attention`."""
    names = [printable(path_of(module)) for module in operations.modules] + ["in no module"]  # -1 picks the last
    return [names[number] for number in module_of_requests(operations)[rows].tolist()]


def purposes(operations: Operations, rows: Column) -> list[str]:
    """What each request is for, in a few words: `saved activation of layers.*.attention`."""
    pairs = zip(role_keys(operations, rows), module_keys(operations, rows), strict=True)
    return [f"{role} of {module}" if module != "in no module" else str(role) for role, module in pairs]


def site_text(key: Hashable) -> str:
    """A key of `site_keys`, as people read it."""
    return site_name([key]) if isinstance(key, Frame) else str(key)


def stack_names(trace: Trace, rows: Column) -> list[tuple[str, ...]]:
    """The frames of the user, outermost first, as people read them; (unknown,) where there are none.

    Where operations are known instead, the module and the role.
    """
    operations = read_operations(trace)
    if operations is not None and read_sites(trace) is None:
        pairs = zip(module_keys(operations, rows), role_keys(operations, rows), strict=True)
        return [(str(module), str(role)) for module, role in pairs]

    def names(stack: list[Frame]) -> tuple[str, ...]:
        frames = user_frames(stack)
        kept = frames[::-1] if frames and is_python(frames[0]) else frames[:1]
        return tuple(site_name([frame]) for frame in kept) or (UNKNOWN,)

    return of_stacks(trace, rows, names, (UNKNOWN,))


MOMENTS = ("peak", "oom", "end")
_MIN_STEPS = 3  # over which something has to grow every time, or nearly, before it is said to
_MIN_SHARE = 0.75
_OPTIMIZER_STEP = "Optimizer.step#"  # how torch names the annotation of one step of an optimizer
#: functions that make what lasts, once, layer by layer
_MAKE_ONCE = {"_init_group", "load_state_dict", "_load_from_state_dict", "_apply", "from_pretrained"}


@dataclass(frozen=True)
class Holder:
    """What one call site, class or size holds."""

    name: str
    held_bytes: int
    requests: int


@dataclass
class Branch:
    """A frame, what was allocated below it, and the frames it called."""

    name: str
    held_bytes: int = 0
    requests: int = 0
    children: list["Branch"] = field(default_factory=list)


@dataclass(frozen=True)
class Growth:
    """A call site that holds more at the end of each step."""

    name: str
    bytes_per_step: int
    steps: int  #: over which it was seen
    held_bytes: int  #: more at the end of the last of them than before the first


@dataclass(frozen=True, kw_only=True)
class Holders:
    """Who holds the memory of one device at one moment."""

    device: int
    at: str  #: peak, oom, end, event, or snapshot where there is no other moment
    event: int  #: the moment is after it; -1: before the first
    allocated_bytes: int
    reserved_bytes: int | None
    requests: int
    wanted_bytes: int | None  #: what the request that ran out of memory asked for
    wanted_by: str
    has_sites: bool
    by_site: list[Holder]
    by_class: list[Holder]
    by_role: list[Holder]  #: parameter, gradient and so on; empty without operations
    by_module: list[Holder]  #: module of the operation that made them, repeated ones as one; empty without operations
    by_size: list[Holder]
    tree: Branch
    growth: list[Growth]


def holders(trace: Trace, at: int | str | None = None) -> Holders:
    """Who holds memory after an event, at the allocated "peak", at the last "oom" or at the "end".

    Without `at` it is the last out-of-memory error, or the peak. Raises BadInputError for a moment that is not there.
    """
    size = trace.aligned_size()
    name, event = _moment(trace, size, at)
    rows = live_rows(trace, event) if event >= 0 else np.flatnonzero(trace.start < 0)
    sites, reserved = site_keys(trace, rows), _reserved(trace, event)
    failed = is_oom(trace, event)
    operations = read_operations(trace)
    return Holders(
        device=trace.device,
        at=name,
        event=event,
        allocated_bytes=int(size[rows].sum()),
        reserved_bytes=reserved,
        requests=len(rows),
        wanted_bytes=int(trace.event_size[event]) if failed else None,
        wanted_by=asked_by(trace, event) if failed else "",
        has_sites=any(key != "unknown" for key in sites),
        by_site=grouped(sites, size[rows], site_text),
        by_class=grouped(class_keys(trace, rows), size[rows], str),
        by_role=grouped(role_keys(operations, rows), size[rows], str) if operations else [],
        by_module=grouped(module_keys(operations, rows), size[rows], str) if operations else [],
        by_size=grouped(trace.size[rows].tolist(), size[rows], human_bytes),
        tree=_tree(stack_names(trace, rows), size[rows]),
        growth=find_growth(trace),
    )


def _moment(trace: Trace, size: Column, at: int | str | None) -> tuple[str, int]:
    if trace.info.get("history") is False and at != "oom":
        return "snapshot", trace.num_events - 1
    if at is None:
        at = "peak" if last_oom(trace) is None else "oom"
    if at == "peak":
        return "peak", allocated_peak(trace, size).event
    if at == "end":
        return "end", trace.num_events - 1
    return "oom" if at == "oom" else "event", event_at(trace, at, "peak, end")


def _reserved(trace: Trace, event: int) -> int | None:
    if not len(trace.action):
        return None
    reserved = int(trace.reserved_bytes()[event]) if event >= 0 else trace.reserved_start_bytes
    return reserved or None


def held_by(keys: Iterable[Hashable], size: Column) -> dict[Any, tuple[int, int]]:
    """Bytes and requests of each key, given the (n,) bytes of the rows that the keys are of."""
    held: dict[Any, tuple[int, int]] = {}
    for key, num_bytes in zip(keys, size.tolist(), strict=True):
        before, count = held.get(key, (0, 0))
        held[key] = before + num_bytes, count + 1
    return held


def grouped(keys: Iterable[Hashable], size: Column, text: Callable[[Any], str]) -> list[Holder]:
    """What each key holds, as `held_by`; most first."""
    found = [Holder(name, *held) for name, held in held_by(map(text, keys), size).items()]
    return sorted(found, key=lambda holder: (-holder.held_bytes, holder.name))


#: levels of a tree: what walks it, and readers of its JSON, recurse
_MOST_LEVELS = 200


def _tree(stacks: Sequence[tuple[str, ...]], size: Column) -> Branch:
    root = Branch("all")
    by_path: dict[tuple[str, ...], Branch] = {(): root}
    for stack, num_bytes in zip(map(_with_middle_left_out, stacks), size.tolist(), strict=True):
        for depth in range(len(stack) + 1):
            branch = by_path.get(stack[:depth])
            if branch is None:
                branch = by_path[stack[:depth]] = Branch(stack[depth - 1])
                by_path[stack[: depth - 1]].children.append(branch)
            branch.held_bytes += num_bytes
            branch.requests += 1
    for branch in by_path.values():
        branch.children.sort(key=lambda child: (-child.held_bytes, child.name))
    return root


def _with_middle_left_out(stack: tuple[str, ...]) -> tuple[str, ...]:
    """A stack of at most so many levels: of a recursion, how it was entered and what it came to."""
    if len(stack) <= _MOST_LEVELS:
        return stack
    half = _MOST_LEVELS // 2
    return (*stack[:half], f"{len(stack) - _MOST_LEVELS + 1} frames left out", *stack[half + 1 - _MOST_LEVELS :])


def find_growth(trace: Trace) -> list[Growth]:
    """The call sites that hold more from step to step, over the second half of the steps; most first."""
    bounds, are_steps = _step_ends(trace)
    bounds = bounds[len(bounds) // 3 :]  # the first steps make what lasts
    if len(bounds) <= _MIN_STEPS:
        return []
    size = trace.aligned_size()
    born = np.searchsorted(bounds, trace.start, side="right")  # the first boundary after its event, which sees it
    lasts = trace.end >= trace.num_events  # beyond a mark that stands at the very end, too
    died = np.where(lasts, len(bounds), np.searchsorted(bounds, trace.end, side="right"))
    rows = np.flatnonzero((born < died) & ~_by_stack(trace, lambda stack: _makes_once(stack, are_steps)))
    held: dict[str, Column] = {}
    for row, key in zip(rows.tolist(), site_keys(trace, rows), strict=True):
        levels = held.setdefault(site_text(key), np.zeros(len(bounds), np.int64))
        levels[born[row] : died[row]] += size[row]
    return sorted(
        (made for name, levels in held.items() if (made := _growth(name, levels)) is not None),
        key=lambda growth: (-growth.bytes_per_step, growth.name),
    )


def _growth(name: str, levels: Column) -> Growth | None:
    steps = np.diff(levels)
    last = steps[-max(1, len(steps) // 4) :]  # what was filled by then, as a cache is, grows no more
    if steps.min() < 0 or np.count_nonzero(steps > 0) < max(_MIN_STEPS, _MIN_SHARE * len(steps)):
        return None
    if np.count_nonzero(last > 0) < _MIN_SHARE * len(last):
        return None
    return Growth(name, round(int(steps.sum()) / len(steps)), len(steps), int(steps.sum()))


def _step_ends(trace: Trace) -> tuple[Column, bool]:
    """Events at which a step ends: the marks, else the ends of the optimizer's steps, else where requests repeat.

    And whether these are steps of the program; what repeats may be the layers that one step of an optimizer goes
    through, unless lines of the program ask for memory in between.
    """
    marks = np.unique(trace.mark_event[trace.mark_kind == MARK_STEP])
    if len(marks):
        return marks, True
    if steps := {number for number, name in enumerate(trace.names) if name.startswith(_OPTIMIZER_STEP)}:
        ends = (trace.mark_kind == MARK_PHASE_END) & np.isin(trace.mark_name, list(steps))
        return np.unique(trace.mark_event[ends]), True
    rows = sequence_rows(trace, TINY_BYTES + 1)
    # layers repeat too, and hold more from one to the next
    # and what is live after the last request counts as never freed: a program that ends lets go of what it has leaked
    last = int(trace.start.max(initial=-1))
    endless = trace.replace(end=np.where(trace.end > last, max(trace.num_events, last + 1), trace.end))
    period = find_step_period(endless, min_repeats=_MIN_STEPS)
    if period is None:
        return marks, False
    repeated = rows[period.first : period.first + period.length]
    others = _by_stack(trace, lambda stack: any(map(is_python, stack)) and not _makes_once(stack, are_steps=False))
    return trace.start[rows[period.first : period.first + period.covered : period.length]], bool(others[repeated].any())


def _by_stack(trace: Trace, holds: Callable[[Sequence[Frame]], bool]) -> Column:
    """(n,) bool: whether a condition holds for the stack of each request; False where it has no stack."""
    return np.array(of_stacks(trace, np.arange(trace.num_requests), holds, False), bool)


def _makes_once(stack: Sequence[Frame], are_steps: bool) -> bool:
    """Whether a stack makes something once: a model that is loaded, or state, whose layers are no steps."""
    steps = [] if are_steps else [frame for frame in stack if frame.name == "step" and "optim" in frame.filename]
    return bool(steps) or any(frame.name in _MAKE_ONCE for frame in stack)
