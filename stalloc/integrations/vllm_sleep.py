"""vLLM's own sleep and wake, noted in `SleepPhases`: its CuMemAllocator unmaps what has its tags, and maps it again.

Contract: both are called as before. A release that names them otherwise notes nothing. The allocator sleeps as a whole
and wakes by tags. Where waking fails, it keeps what it has mapped by then, and is taken to sleep on.
"""

import os
import sys
from types import FrameType
from typing import Any

from stalloc.imports import after_import
from stalloc.integrations.sleep_phases import SleepPhases
from stalloc.trace.sites import Frame, site_name

_MODULE = "vllm.device_allocator.cumem"


def watch_vllm(phases: SleepPhases) -> None:
    """Note what it does from when it is imported."""
    after_import(_MODULE, lambda: _watch(getattr(sys.modules[_MODULE], "CuMemAllocator", None), phases))


def _watch(owner: Any, phases: SleepPhases) -> None:
    sleep, wake_up = getattr(owner, "sleep", None), getattr(owner, "wake_up", None)
    if sleep is None or wake_up is None:
        return
    asleep: set[int] = set()  # addresses

    def slept(engine: Any, offload_tags: Any = None) -> Any:
        phases.end(None)
        told = sleep(engine, offload_tags)
        asleep.update(engine.pointer_to_data)
        kept = ", ".join([offload_tags] if isinstance(offload_tags, str) else offload_tags or ())
        phases.begin(f"sleep, {kept} kept" if kept else "sleep", _by_tag(engine, asleep))
        return told

    def woken(engine: Any, tags: Any = None) -> Any:
        found = engine.pointer_to_data
        waking = {address for address in asleep & found.keys() if tags is None or found[address].tag in tags}
        begins = f"wake {', '.join(tags or ())}".strip()
        phases.end(None)
        free_bytes, cached_bytes = sys.modules["torch"].cuda.mem_get_info()[0], _cached_bytes()
        try:
            told = wake_up(engine, tags)
        except RuntimeError:
            wanted = _by_tag(engine, waking)
            phases.refused(
                waking=", ".join(wanted),
                at=_line_of_program(),
                wanted_bytes=sum(wanted.values()),
                free_bytes=free_bytes,
                could_sleep={},
                cached_bytes=cached_bytes,
            )
            phases.begin(f"{begins}, in vain", _by_tag(engine, asleep))
            raise
        asleep.difference_update(waking)
        phases.begin(begins, _by_tag(engine, asleep))
        return told

    owner.sleep, owner.wake_up = slept, woken


def _by_tag(engine: Any, addresses: set[int]) -> dict[str, int]:
    """The bytes of what lives at these addresses, by tag; the second word of its handle is its size."""
    found: dict[str, int] = {}
    for address, data in engine.pointer_to_data.items():
        if address in addresses:
            found[data.tag] = found.get(data.tag, 0) + data.handle[1]
    return found


def _line_of_program() -> str:
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None:
        if f"{os.sep}vllm{os.sep}" not in frame.f_code.co_filename:
            frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return site_name(frames)


def _cached_bytes() -> int:
    """What torch.cuda.empty_cache() would give back."""
    segments = sys.modules["torch"].cuda.memory_snapshot()
    common = [one for one in segments if tuple(one.get("segment_pool_id", (0, 0))) == (0, 0)]
    return sum(one["total_size"] for one in common if not one["active_size"])
