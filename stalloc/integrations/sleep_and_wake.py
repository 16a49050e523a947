"""A job that sleeps: its device memory goes back to the device, for others to use, while every address stays valid.

Contract: as long as a job sleeps that was not told which tags, whoever asks for memory gets one sentence; what is freed
is freed. Sleeping affects all devices of the process that were used, or none. What is tagged is found where it lies
when the job falls asleep.

Where a run has `SleepPhases`, they are told; without them nothing is looked at, and nothing of that asks for memory of
the device.
"""

import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stalloc.core.constants import GRANULE
from stalloc.errors import BadInputError, SetupError
from stalloc.integrations.installation import installation
from stalloc.integrations.memory_figures import served_controllers
from stalloc.runtime import Controller, Runtime, current
from stalloc.runtime.call_sites import this_call_site
from stalloc.sleeping.asleep import (
    InFile,
    InHost,
    Keeper,
    Sleep,
    Tags,
    check_can_sleep,
    could_give_back,
    fall_asleep,
    wake_up,
)

_KEEPERS = ("host", "disk", "drop")
_asleep: list[Sleep] = []
_tagged: dict[str, list["weakref.ref[Any]"]] = {}


@dataclass(frozen=True)
class Slept:
    given_back_bytes: int  #: of device memory
    kept_bytes: int  #: that were copied


def tag(name: str, *objects: Any) -> None:
    """Give tensors, modules, optimizers (their state) and CuPy arrays a name, for `sleep(tags=…)` and `wake(tags=…)`.

    One object may have several names. They are held weakly: what is gone has none. Raises BadInputError for other
    objects.
    """
    for one in objects:
        _addresses(one)
    _tagged.setdefault(name, []).extend(map(weakref.ref, objects))


def sleep(
    *,
    to: Literal["host", "disk", "drop"] = "host",
    drop: Iterable[Any] = (),
    folder: str | Path | None = None,
    tags: str | Iterable[str] | None = None,
) -> Slept:
    """Give the device memory of this process back until `wake()`; tensors and arrays keep their addresses and values.

    `to`: where the bytes stay meanwhile: in pinned host memory, in a file in `folder` (by default the one for temporary
    files), or nowhere, so that they are lost. `drop` names tensors and arrays whose bytes need not be kept, say a cache
    that is filled anew. Nothing may use what sleeps until it is awake, and nobody gets memory until everything is.

    With `tags` only pages go back in which nothing lives but what has one of them; later calls may let more go to
    sleep. The rest of the process goes on, and gets memory, also what was given back.

    Where PyTorch's own allocator is tried for comparison (`stalloc dryrun`, `run --compare-native`) nothing sleeps.

    Raises SetupError, with the job as it was, where memory cannot be given back or there is no room for the bytes, and
    BadInputError for a tag that nothing was given.
    """
    runtime = current()
    if runtime is None and installation.is_compared:
        installation.was_to_sleep = True
        return Slept(0, 0)
    if runtime is None:
        raise SetupError("stalloc does not serve this process, so it cannot sleep: call stalloc.install() first.")
    if to not in _KEEPERS:
        raise BadInputError(f"a job cannot sleep to {str(to)[:20]!r}: choose one of {', '.join(_KEEPERS)}.")
    wanted = _wanted(tags)
    if _asleep and installation.sleeps_whole:
        raise SetupError("this job sleeps already: call stalloc.wake() first.")
    without = {address for one in drop for address in _addresses(one)}
    named = _named_addresses()
    used = served_controllers(runtime)
    for controller in used:
        check_can_sleep(controller)
    done: list[Sleep] = []
    _end_phase(runtime)
    runtime.refuse_requests("this job sleeps, and its memory is with others: call stalloc.wake() first.")
    try:
        for controller in used:
            done += fall_asleep(controller, lambda: _keeper(to, folder), without, named, wanted)
    except BaseException:
        for one in done:
            wake_up(one)
        _serve(runtime)
        raise
    _asleep.extend(done)
    installation.sleeps_whole = wanted is None
    _serve(runtime)
    _begin_phase("sleep", wanted)
    return Slept(sum(one.held_bytes for one in done), sum(one.kept_bytes for one in done))


def wake(*, tags: str | Iterable[str] | None = None) -> None:
    """Take memory for what a job that sleeps had, at the same addresses, with the bytes that were kept.

    With `tags` only for the pages in which something lives that has one of them. What is free elsewhere in the process
    goes back first. Raises SetupError if the device has no room even so, and says how much is missing: what is not
    awake yet sleeps on. A job that is awake stays so.
    """
    runtime = current()
    wanted = _wanted(tags)
    waking = [one for one in reversed(_asleep) if wanted is None or one.tags & wanted]
    if waking and runtime is not None:
        _end_phase(runtime)
    for number, one in enumerate(waking):
        try:
            wake_up(one)
        except SetupError:
            _note_waking(waking[number:])
            raise
        _asleep.remove(one)
        installation.sleeps_whole = False
    if waking:
        _begin_phase("wake", wanted)
    if runtime is not None:
        _serve(runtime)


def tell_phases(runtime: Runtime) -> None:
    """Have requests that are refused noted with the phases, once something is tagged."""

    def note(device: int, size_bytes: int, _: int, free_bytes: int) -> None:
        if installation.sleep_phases is not None and (tags := _named_addresses()):
            could = _could_sleep(runtime.controllers[device], tags)
            installation.sleep_phases.refused(
                waking=None, at=this_call_site(), wanted_bytes=size_bytes, free_bytes=free_bytes, could_sleep=could
            )

    runtime.observers.append(note)


def phases_told(runtime: Runtime | None, *, failed: bool) -> dict[str, Any] | None:
    """The phases of a program that is over, as `SleepPhases.told` has them."""
    if runtime is None or installation.sleep_phases is None:
        return None
    _end_phase(runtime)
    told: dict[str, Any] | None = installation.sleep_phases.told(failed=failed)
    return told


def _serve(runtime: Runtime) -> None:
    """Serve requests, unless the whole job is asleep; and from all pools of the devices of which nothing is."""
    for controller in served_controllers(runtime):
        if all(one.controller is not controller for one in _asleep):
            with controller.lock:
                controller.state.heap.wake_pools()
    if not any(one.refuses for one in _asleep):
        runtime.serve_requests()


def _wanted(tags: str | Iterable[str] | None) -> frozenset[str] | None:
    if tags is None:
        return None
    wanted = frozenset([tags] if isinstance(tags, str) else tags)
    for name in wanted - _tagged.keys():
        raise BadInputError(f"nothing is tagged {str(name)[:40]!r}: call stalloc.tag(name, tensor, …) first.")
    return wanted


def _named_addresses() -> dict[int, Tags]:
    """The tags of the memory at each address that has any."""
    found: dict[int, Tags] = {}
    for name, objects in _tagged.items():
        objects[:] = [one for one in objects if one() is not None]
        for address in (address for one in objects for address in _addresses(one())):
            found[address] = found.get(address, frozenset()) | {name}
    return found


def _keeper(to: str, folder: str | Path | None) -> Keeper:
    if to == "disk":
        return InFile(Path(folder or tempfile.gettempdir()))
    return InHost() if to == "host" else Keeper()


def _addresses(value: Any) -> list[int]:
    """Where the memory of a tensor, of what a module or the state of an optimizer holds, or of a CuPy array begins."""
    if hasattr(value, "untyped_storage"):
        return [value.untyped_storage().data_ptr()] if value.is_cuda else []
    if hasattr(value, "parameters") and hasattr(value, "buffers"):
        return [address for one in (*value.parameters(), *value.buffers()) for address in _addresses(one)]
    if hasattr(value, "param_groups") and hasattr(value, "state"):
        held = (one for state in value.state.values() if isinstance(state, dict) for one in state.values())
        return [address for one in held if hasattr(one, "untyped_storage") for address in _addresses(one)]
    if hasattr(value, "data") and hasattr(value.data, "mem"):
        return [int(value.data.mem.ptr)]
    raise BadInputError(f"{type(value).__name__} is no tensor, module, optimizer or array: give one of those.")


def _end_phase(runtime: Runtime) -> None:
    """Something is about to sleep or to wake."""
    if installation.sleep_phases is not None:
        peaks = [
            one.state.take_phase_peak() - sum(part.live_bytes for part in _asleep if part.controller is one)
            for one in served_controllers(runtime)
        ]
        installation.sleep_phases.end(max(peaks, default=0))


def _begin_phase(how: str, wanted: Iterable[str] | None) -> None:
    if installation.sleep_phases is not None:
        held: Counter[str] = Counter()
        for one in _asleep:
            held[" + ".join(sorted(tag or "what has no tag" for tag in one.tags))] += one.held_bytes
        installation.sleep_phases.begin(f"{how} {', '.join(sorted(wanted or ()))}".strip(), dict(held))


def _note_waking(waking: Sequence[Sleep]) -> None:
    """The first of these found no room."""
    if installation.sleep_phases is not None:
        controller = waking[0].controller
        mapped = [pages for one in waking if one.controller is controller for _, pages in one.to_map()]
        installation.sleep_phases.refused(
            waking=", ".join(sorted({tag for one in waking for tag in one.tags if tag})) or "what has no tag",
            at=this_call_site(),
            wanted_bytes=GRANULE * sum(map(len, mapped)),
            free_bytes=controller.memory.source.free_bytes(),
            could_sleep=_could_sleep(controller, _named_addresses()),
        )


def _could_sleep(controller: Controller, tags: Mapping[int, Tags]) -> dict[str, int]:
    names = sorted({name for named in tags.values() for name in named if name})
    found = {name: could_give_back(controller, tags, [name]) for name in names}
    return {name: size for name, size in found.items() if size}
