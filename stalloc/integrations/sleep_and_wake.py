"""A job that sleeps: its device memory goes back to the device, for others to use, while every address stays valid.

Contract: between `sleep` and `wake` whoever asks for memory gets one sentence; what is freed is freed. Both affect all
devices of the process that were used, or none.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stalloc.errors import BadInputError, SetupError
from stalloc.integrations.memory_figures import served_controllers
from stalloc.runtime import current
from stalloc.runtime.kept_bytes import InFile, InHost, Keeper, Nowhere
from stalloc.runtime.sleeping import Sleep, check_can_sleep, fall_asleep, wake_up

_KEEPERS = ("host", "disk", "drop")
_asleep: list[Sleep] = []


@dataclass(frozen=True)
class Slept:
    """What sleeping did."""

    given_back_bytes: int  #: of device memory
    kept_bytes: int  #: that were copied


def sleep(
    *, to: Literal["host", "disk", "drop"] = "host", drop: Iterable[Any] = (), folder: str | Path | None = None
) -> Slept:
    """Give the device memory of this process back until `wake()`; tensors and arrays keep their addresses and values.

    `to`: where the bytes stay meanwhile: in pinned host memory, in a file in `folder` (by default the one for temporary
    files), or nowhere, so that they are lost. `drop` names tensors and arrays whose bytes need not be kept, say a cache
    that is filled anew. Nothing may compute on the device until `wake()`.

    Raises SetupError, with the job awake, where memory cannot be given back or there is no room for the bytes.
    """
    runtime = current()
    if runtime is None:
        raise SetupError("stalloc does not serve this process, so it cannot sleep: call stalloc.install() first.")
    if to not in _KEEPERS:
        raise BadInputError(f"a job cannot sleep to {str(to)[:20]!r}: choose one of {', '.join(_KEEPERS)}.")
    if _asleep:
        raise SetupError("this job sleeps already: call stalloc.wake() first.")
    without = {address for one in drop for address in _addresses(one)}
    used = served_controllers(runtime)
    for controller in used:
        check_can_sleep(controller)
    done: list[Sleep] = []
    runtime.refuse_requests("this job sleeps, and its memory is with others: call stalloc.wake() first.")
    try:
        done.extend(fall_asleep(controller, _keeper(to, folder), without) for controller in used)
    except BaseException:
        for one in done:
            wake_up(one)
        runtime.serve_requests()
        raise
    _asleep.extend(done)
    return Slept(sum(one.held_bytes for one in done), sum(one.kept_bytes for one in done))


def wake() -> None:
    """Take memory for what a job that sleeps had, at the same addresses, with the bytes that were kept.

    Raises SetupError if the device has no room for it: the job sleeps on. A job that is awake stays so.
    """
    runtime = current()
    while _asleep:
        wake_up(_asleep[-1])
        _asleep.pop()
    if runtime is not None:
        runtime.serve_requests()


def _keeper(to: str, folder: str | Path | None) -> Keeper:
    if to == "host":
        return InHost()
    return InFile(Path(folder or tempfile.gettempdir())) if to == "disk" else Nowhere()


def _addresses(value: Any) -> list[int]:
    """Where the memory of a tensor, of the parameters and buffers of a module, or of a CuPy array begins."""
    if hasattr(value, "untyped_storage"):
        return [value.untyped_storage().data_ptr()] if value.is_cuda else []
    if hasattr(value, "parameters") and hasattr(value, "buffers"):
        return [address for one in (*value.parameters(), *value.buffers()) for address in _addresses(one)]
    if hasattr(value, "data") and hasattr(value.data, "mem"):
        return [int(value.data.mem.ptr)]
    raise BadInputError(f"{type(value).__name__} is no tensor, module or array: drop=[…] takes those.")
