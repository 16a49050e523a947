"""What a study of copies and phases comes to, in sentences: what was waited for, what could overlap, what a link does.

Contract: plain text, the most important first; a sentence is left out where its figures are not known, or too small to
matter.
"""

from stalloc.analysis.offload_study import SIZE_CLASSES
from stalloc.analysis.study_record import Study
from stalloc.figures import human_bytes, human_seconds
from stalloc.printable import printable
from stalloc.trace.activity import Link

_MATTERS, _NOTICED = 0.01, 0.001  # of all the time, from which seconds are worth half a sentence, and one
_HOW = "no GPU ran, and a model says what each operation and copy costs"
_NO_TIMES = (
    "Times are not shown: a virtual GPU computes nothing, so that its own are not those of a GPU. stalloc record --ops "
    "has them estimated."
)
_HOST_LINKS = (Link.TO_DEVICE.text, Link.TO_HOST.text)
_SMALL, _MANY = SIZE_CLASSES[0][0], 32


def findings(found: Study) -> list[str]:
    if not found.has_times:
        return [_NO_TIMES, *_moved(found), *_headroom(found)]
    estimated = f"Times are estimated, for one step on {printable(found.device_name)}: {_HOW}."
    return [
        *([estimated] if found.is_estimated else []),
        *_blocking(found),
        *_overlap(found),
        *_idle(found),
        *_parts(found),
        *_links(found),
        *_small(found),
        *_headroom(found),
    ]


def copies_text(count: int) -> str:
    """`1 copy`, `1,234 copies`."""
    return f"{count:,} {'copy' if count == 1 else 'copies'}"


def bytes_text(size: int | None) -> str:
    return "unknown" if size is None else human_bytes(size)


def _moved(found: Study) -> list[str]:
    told = ((link.link, bytes_text(link.num_bytes), copies_text(link.copies)) for link in found.links)
    return [f"The link {link} moved {size} in {copies}." for link, size, copies in told]


def _share(seconds: float, found: Study) -> str:
    return f"{seconds / max(found.seconds, 1e-12):.1%}"


def _blocking(found: Study) -> list[str]:
    one = found.blocking
    if one is None or not found.links:
        return []
    if not one.copies:
        return ["No copy made the program stand still."]
    if one.stood_seconds < _NOTICED * found.seconds:
        return []
    told = [
        f"The program stood still for {copies_text(one.copies)} of {bytes_text(one.num_bytes or None)}: "
        f"{human_seconds(one.stood_seconds)} of {human_seconds(found.seconds)} "
        f"({_share(one.stood_seconds, found)}) in the calls that asked for them, of which they copied for "
        f"{human_seconds(one.copy_seconds)}."
    ]
    if one.pageable_bytes > 0.5 * one.num_bytes:
        told.append(
            f"{human_bytes(one.pageable_bytes)} of that lie in pageable memory of the host: from page-locked memory "
            "(pin_memory, non_blocking=True) copies run while the program goes on."
        )
    return told


def _overlap(found: Study) -> list[str]:
    alone = sum(phase.copy_seconds for phase in found.phases)
    both = sum(phase.overlap_seconds for phase in found.phases)
    if alone + both < _NOTICED * found.seconds or not found.knows_computing:
        return []
    share = f"{human_seconds(both)} ({both / (alone + both):.0%})" if both else "Nothing"
    text = f"{share} of {human_seconds(alone + both)} of copying ran beside computing"
    missed = found.missed_across_seconds
    if missed < _MATTERS * found.seconds:
        return [f"{text}."]
    more = f"{human_seconds(missed)} {'more ' if both else ''}could have, {_share(missed, found)} of all the time"
    return [f"{text}; at most {more}{_where(found)}.", _allowed(found)]


def _where(found: Study) -> str:
    """In which phases copies and computing run alone."""
    if len(found.phases) < 2:
        return ""
    within = found.missed_overlap_seconds
    copies = max(found.phases, key=lambda phase: phase.copy_seconds)
    computes = max(found.phases, key=lambda phase: phase.compute_seconds)
    if copies is computes or found.missed_across_seconds - within < _NOTICED * found.seconds:
        worst = max(found.phases, key=lambda phase: min(phase.copy_seconds, phase.compute_seconds))
        return f", most of it in {printable(worst.name)}"
    return (
        f": {human_seconds(within)} beside what its own phase computes, the rest beside other phases ("
        f"{printable(copies.name)} only copies for {human_seconds(copies.copy_seconds)}, {printable(computes.name)} "
        f"only computes for {human_seconds(computes.compute_seconds)})"
    )


def _allowed(found: Study) -> str:
    """How much of the possible overlap the program's data dependencies permit, as far as that is known."""
    ready = found.as_ready
    if ready is None:
        return (
            "The file does not say which work needs the results of which, so how much of that is possible is unknown."
        )
    saved = sum(phase.copy_seconds for phase in found.phases) - ready.copy_seconds
    if saved < _NOTICED * found.seconds or ready.seconds >= found.seconds:
        return "Starting each operation and copy as soon as its data is there would not let more of them overlap."
    left = [phase.headroom_bytes for phase in found.phases if phase.headroom_bytes is not None]
    room = ""
    if left and not found.headroom_is_bound:
        room = ", which it has" if ready.more_bytes <= min(left) else ", which it does not have"
    return (
        f"The data that operations need of one another permits {human_seconds(saved)} of it: if each operation and "
        f"copy ran as soon as its data is there, the step would take {human_seconds(ready.seconds)} in place of "
        f"{human_seconds(found.seconds)}, and what comes to the device earlier up to {human_bytes(ready.more_bytes)} "
        f"more of its memory{room}. What copies leave in host memory, for other copies or for the program to decide "
        "by, is not recorded, so it may be less."
    )


def _idle(found: Study) -> list[str]:
    idle = sum(phase.idle_seconds for phase in found.phases)
    if idle < 0.1 * found.seconds or not found.knows_computing:
        return []
    worst = max(found.phases, key=lambda phase: phase.idle_seconds)
    where = f", {human_seconds(worst.idle_seconds)} of it in {printable(worst.name)}" if len(found.phases) > 1 else ""
    return [f"The device neither computed nor copied for {human_seconds(idle)} ({_share(idle, found)}){where}."]


def _parts(found: Study) -> list[str]:
    """Named parts of a phase beside its longest, such as the exchange of gradients; numbered ones are of an update."""
    told = []
    for phase in found.phases:
        named = [one for one in found.parts if one.phase == phase.name and not one.name.isdecimal()]
        for one in sorted(named, key=lambda part: -part.seconds)[1:]:
            if one.seconds >= max(0.1 * phase.seconds, _MATTERS * found.seconds):
                share = one.seconds / max(phase.seconds, 1e-12)
                told.append(
                    f"{printable(one.name).capitalize()} takes {human_seconds(one.seconds)} of the "
                    f"{human_seconds(phase.seconds)} of {printable(phase.name)} ({share:.1%})."
                )
    return told


def _links(found: Study) -> list[str]:
    told = []
    for link in found.links:
        if link.used is None or link.peak_rate is None:
            continue
        peak = f"{human_bytes(int(link.peak_rate))}/s"
        kind = "estimated" if found.is_estimated else "measured"
        text = f"The link {link.link} is used to {link.used:.1%} of its {kind} peak of {peak}"
        most = max(found.phases, key=lambda phase: phase.link_used.get(link.link, 0.0))
        if len(found.phases) > 1:
            text += f", most in {printable(most.name)} ({most.link_used[link.link]:.1%})"
        told.append(f"{text}.")
    return told


def _small(found: Study) -> list[str]:
    copies = {link.link: link.copies for link in found.links}
    return [
        f"{one.copies:,} of {copies_text(copies[one.link])} {one.link} are {_SMALL} and reach "
        f"{human_bytes(int(one.rate or 0))}/s: fewer, larger ones are quicker."
        for one in found.sizes
        if one.size == _SMALL and one.copies >= max(0.5 * copies[one.link], _MANY)
    ]


def _headroom(found: Study) -> list[str]:
    known = [phase for phase in found.phases if phase.headroom_bytes is not None]
    if not known:
        return []
    least = min(known, key=lambda phase: phase.headroom_bytes or 0)
    where = f" in {printable(least.name)}" if len(found.phases) > 1 else ""
    bound = "at most" if found.headroom_is_bound else "at least"
    room = least.headroom_bytes or 0
    told = [f"The device had {bound} {human_bytes(room)} left{where}."]
    on_host = max((phase.host_bytes or 0 for phase in found.phases), default=0)
    copying = sum(link.busy_seconds for link in found.links if link.link in _HOST_LINKS)
    if not on_host or room <= 0 or copying < _NOTICED * found.seconds:
        return told  # it is not what costs time
    if on_host <= room:
        what = f"All of the {human_bytes(on_host)} that the program holds in host memory"
    else:
        what = f"{human_bytes(room)} of the {human_bytes(on_host)} that the program holds in host memory"
    would = "would at best fit" if found.headroom_is_bound else "would fit"
    return [*told, f"{what} {would} into that: what stays on the device need not be copied."]
