"""What `stalloc.sleep` and `stalloc.wake` note in `SleepPhases`, where a run has one.

Contract: without one nothing is looked at. Nothing here asks for memory of the device.
"""

from collections.abc import Iterable, Mapping, Sequence

from stalloc.core.constants import GRANULE
from stalloc.integrations.installation import installation
from stalloc.integrations.memory_figures import served_controllers
from stalloc.runtime import Controller, Runtime
from stalloc.runtime.call_sites import this_call_site
from stalloc.sleeping.asleep import Sleep, Tags, could_give_back


def end_phase(runtime: Runtime, asleep: Sequence[Sleep]) -> None:
    """Something is about to sleep or to wake."""
    if installation.sleep_phases is not None:
        peaks = [
            one.state.take_phase_peak() - sum(part.live_bytes for part in asleep if part.controller is one)
            for one in served_controllers(runtime)
        ]
        installation.sleep_phases.end(max(peaks, default=0))


def begin_phase(how: str, wanted: Iterable[str] | None, asleep: Sequence[Sleep]) -> None:
    """It does; `asleep` is all that sleeps now."""
    if installation.sleep_phases is not None:
        held: dict[str, int] = {}
        for one in asleep:
            name = " + ".join(sorted(tag or "what has no tag" for tag in one.tags))
            held[name] = held.get(name, 0) + one.held_bytes
        installation.sleep_phases.begin(" ".join([how, ", ".join(sorted(wanted or ()))]).strip(), held)


def note_request(runtime: Runtime, device: int, size_bytes: int, free_bytes: int, tags: Mapping[int, Tags]) -> None:
    """A request of a program with tags found no memory."""
    if installation.sleep_phases is not None and tags:
        could = _could_sleep(runtime.controllers[device], tags)
        installation.sleep_phases.refused(
            waking=None, at=this_call_site(), wanted_bytes=size_bytes, free_bytes=free_bytes, could_sleep=could
        )


def note_waking(waking: Sequence[Sleep], tags: Mapping[int, Tags]) -> None:
    """The first of these found no room."""
    if installation.sleep_phases is not None:
        controller = waking[0].controller
        mapped = [pages for one in waking if one.controller is controller for _, pages in one.to_map()]
        installation.sleep_phases.refused(
            waking=", ".join(sorted({tag for one in waking for tag in one.tags if tag})) or "what has no tag",
            at=this_call_site(),
            wanted_bytes=GRANULE * sum(map(len, mapped)),
            free_bytes=controller.memory.source.free_bytes(),
            could_sleep=_could_sleep(controller, tags),
        )


def _could_sleep(controller: Controller, tags: Mapping[int, Tags]) -> dict[str, int]:
    """What each tag that is awake would give back."""
    names = sorted({name for named in tags.values() for name in named if name})
    found = {name: could_give_back(controller, tags, [name]) for name in names}
    return {name: size for name, size in found.items() if size}
