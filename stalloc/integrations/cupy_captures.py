"""Graphs that CuPy captures: what is asked for meanwhile comes from a private pool, as for graphs of torch.

Contract: between `Stream.begin_capture` and `end_capture` everything is served from a pool that only captures of CuPy
use, one a device: what a graph writes to is given to no array outside. Before, free memory goes back to the device, as
torch.cuda.graph does it, since none can while the capture is on. CuPy's graphs do not say when they are gone, so
its memory stays; what a capture frees serves the next one.
"""

import functools
from collections.abc import Callable
from typing import Any

from stalloc.runtime import Runtime
from stalloc.runtime.captures import OF_CUPY

_own: dict[str, Callable[..., Any]] = {}


def heed_captures(runtime: Runtime) -> None:
    """Serve the captures of CuPy's streams from here on."""
    from cupy.cuda.device import get_device_id
    from cupy.cuda.stream import _BaseStream

    begin, end = _own["begin_capture"], _own["end_capture"] = _BaseStream.begin_capture, _BaseStream.end_capture

    @functools.wraps(begin)
    def begin_capture(stream: Any, *args: Any, **kwargs: Any) -> Any:
        controller = runtime.controllers[get_device_id()]
        captures = controller.captures
        if not controller.memory.is_capturing:
            controller.memory.release_unused()
        captures.begin(OF_CUPY)
        try:
            return begin(stream, *args, **kwargs)
        except BaseException:
            captures.end()
            raise

    @functools.wraps(end)
    def end_capture(stream: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(stream, *args, **kwargs)
        finally:
            runtime.controllers[get_device_id()].captures.end()

    _BaseStream.begin_capture, _BaseStream.end_capture = begin_capture, end_capture


def forget_captures() -> None:
    """Leave CuPy's streams as they were."""
    from cupy.cuda.stream import _BaseStream

    for name, function in _own.items():
        setattr(_BaseStream, name, function)
    _own.clear()
