"""How stalloc stands in this process: the one object that says what is installed, watched for and handed out.

Contract: a field is written by the module that its group is named after, and read by others. A start of Python under
STALLOC=1 loads this, so it loads nothing.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from stalloc.runtime import Runtime


class Installation:
    """The state of a process; a new one is that of a process without stalloc."""

    # startup
    is_armed = False  #: the hook of STALLOC=1 has run
    is_watching = False  #: imports of torch and CuPy are watched for
    start: "Callable[[], object] | None" = None  #: to be called at the first use of CUDA
    was_started = False  #: it was called, whatever came of it
    is_starting = False  #: it is being called
    cupy_allocators: "tuple[Any, ...]" = ()  #: what CuPy allocates by as long as the program has not chosen itself

    # installing
    is_on = False  #: CuPy is served, and steps are planned
    serves_torch = False  #: for good
    awaits_torch = False  #: its import is watched for
    num_scopes = 0  #: of `with stalloc.scope()` that are open
    marks_steps = False  #: the program marks its steps itself

    # cupy_allocator, cupy_default_pool
    cupy_before: "Any" = None  #: the allocator that CuPy had
    cupy_allocator: "Any" = None  #: ours, while CuPy has it
    cupy_pool: "Any" = None  #: the Pool that answers as CuPy's default pool
    cupy_pool_before: "Callable[[], Any] | None" = None  #: what CuPy's own is asked for by, while ours answers

    # torch_allocator
    replays: "Any" = None  #: the Replays of torch's CUDA graphs

    # cli.native, sizing.side_by_side
    is_compared = False  #: PyTorch's own allocator is tried here for comparison, so `stalloc.sleep` does nothing

    # cli.run, server_watch
    sleep_phases: "Any" = None  #: the SleepPhases of a run on the virtual GPU, where somebody asks for them

    # sleep_and_wake, memory_figures, flight_record
    was_to_sleep = False  #: it was called all the same
    sleeps_whole = False  #: all of the job was told to sleep last, and nothing has woken
    showing: "Any" = None  #: the Showing of `stalloc live`
    flight_recorder: "Any" = None  #: the FlightRecorder


installation = Installation()


def current() -> "Runtime | None":
    """The runtime of this process, None before it was started."""
    process = sys.modules.get("stalloc.runtime.process")
    return process.current() if process is not None else None
