"""What rows of a trace are grouped by when it is said who holds memory: lifespan class, call site, role, module.

Contract: one key for each row that is asked for, in its order; what is not known has the key `unknown`.
"""

from collections.abc import Hashable

from stalloc.columns import Column
from stalloc.lifespans import LifespanClass, classify, find_step_period, fold, module_of_requests
from stalloc.lifespans.roles import path_of
from stalloc.printable import printable
from stalloc.trace import Trace
from stalloc.trace.operations import Operations, Role, read_operations
from stalloc.trace.sites import UNKNOWN, Frame, is_python, read_sites, site_name, user_frames


def class_keys(trace: Trace, rows: Column) -> list[Hashable]:
    """The lower-case name of the lifespan class."""
    step = find_step_period(trace)
    lifespan = classify(trace, fold(trace, period=step) if step else None).lifespan
    names = {int(one): one.name.lower() for one in LifespanClass}
    return [names[value] for value in lifespan[rows].tolist()]


def site_keys(trace: Trace, rows: Column) -> list[Hashable]:
    """The innermost frame of the user, or the name of the stack where there is no Python."""
    sites = read_sites(trace)
    if sites is None:
        return [UNKNOWN] * len(rows)
    keys: list[Hashable] = []
    for number in range(sites.num_stacks):
        stack = sites.stack(number)
        frames = user_frames(stack)
        keys.append(frames[0] if frames and is_python(frames[0]) else site_name(stack))
    keys.append(UNKNOWN)  # -1 picks the last
    return [keys[number] for number in sites.site[rows].tolist()]


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
    sites, operations = read_sites(trace), read_operations(trace)
    if sites is None and operations is not None:
        pairs = zip(module_keys(operations, rows), role_keys(operations, rows), strict=True)
        return [(str(module), str(role)) for module, role in pairs]
    if sites is None:
        return [(UNKNOWN,)] * len(rows)
    names: list[tuple[str, ...]] = []
    for number in range(sites.num_stacks):
        frames = user_frames(sites.stack(number))
        kept = frames[::-1] if frames and is_python(frames[0]) else frames[:1]
        names.append(tuple(site_name([frame]) for frame in kept) or (UNKNOWN,))
    names.append((UNKNOWN,))
    return [names[number] for number in sites.site[rows].tolist()]
