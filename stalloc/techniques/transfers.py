"""Copies between the device and the host, on two streams beside the program's own.

Contract: copies of one direction run in the order in which they were asked for. Memory of the device that a copy uses
is let go only after `wait` has made the program's stream wait for it: at fixed points of the program, so that steps
repeat, and never by record_stream. Each device has its two streams once. Without a GPU a copy is made at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._C._profiler import _RecordFunctionFast

Pair = tuple[torch.Tensor, torch.Tensor]
"""The tensor to write, and the tensor to read."""
_streams: dict[int, tuple[Any, Any]] = {}


@dataclass(frozen=True)
class Copied:
    """One copy, or several in a row, between two events that time it."""

    device: int
    to_device: bool
    num_bytes: int
    phase: str  #: of the program, such as "update/3"; empty: not known
    begin: Any
    end: Any


listeners: list[Callable[[Copied], None]] = []  #: are told of each copy when it has been asked for
_phase = ""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A block whose copies belong to a phase of the program, which a profiler shows as a range of that name."""
    global _phase
    before, _phase = _phase, name
    try:
        with _RecordFunctionFast(name):
            yield
    finally:
        _phase = before


def current_phase() -> str:
    """The phase of the program in which this is called."""
    return _phase


class Transfers:
    """The copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self._to_device = self._to_host = None
        self._last: Any = None  # event after the last copy to the host
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            if index not in _streams:
                _streams[index] = torch.cuda.Stream(index), torch.cuda.Stream(index)
            self._to_device, self._to_host = _streams[index]

    def to_device(self, pairs: Sequence[Pair]) -> Any:
        """Copy from the host, after what the program's stream has to do so far; the event returned is for `wait`."""
        return self._copy(self._to_device, pairs)

    def to_host(self, pairs: Sequence[Pair]) -> Any:
        """Copy to the host, after what the program's stream has to do so far; the event returned is for `wait`."""
        event = self._copy(self._to_host, pairs)
        self._last = event if event is not None else self._last
        return event

    def follow(self) -> None:
        """Make what `copy_now` copies from here on, in any thread, come after the work that the program has queued."""
        for stream in (self._to_device, self._to_host):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(stream.device))

    def copy_now(self, target: torch.Tensor, source: torch.Tensor, of_phase: str) -> None:
        """Copy and wait in this thread, for a phase that may be over by now."""
        event = self.copy_all([(target, source)], of_phase, to_device=target.is_cuda)
        if event is not None:
            event.synchronize()

    def copy_all(self, pairs: Sequence[Pair], of_phase: str, *, to_device: bool) -> Any:
        """Begin to copy, in a thread that has waited for the program's earlier work; the result is for `wait`."""
        return self._enqueue(self._to_device if to_device else self._to_host, pairs, of_phase)

    def wait(self, event: Any, stream: Any = None) -> None:
        """Let the program's stream wait for copies: the current one, or another."""
        if event is not None:
            (stream or torch.cuda.current_stream()).wait_event(event)

    def settle(self) -> None:
        """Let the processor wait for all copies to the host, before it looks at what they write."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def _copy(self, stream: Any, pairs: Sequence[Pair]) -> Any:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return self._enqueue(stream, pairs, _phase)

    def _enqueue(self, stream: Any, pairs: Sequence[Pair], of_phase: str) -> Any:
        with torch.no_grad():
            if stream is None:
                for target, source in pairs:
                    target.copy_(source)
                return None
            begin = stream.record_event(torch.cuda.Event(enable_timing=True)) if listeners else None
            with torch.cuda.stream(stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
            end = stream.record_event(torch.cuda.Event(enable_timing=begin is not None))
        if begin is not None:
            num_bytes = sum(target.nbytes for target, _ in pairs)
            copied = Copied(stream.device.index, stream is self._to_device, num_bytes, of_phase, begin, end)
            for listener in listeners:
                listener(copied)
        return end


class Settles(Protocol):
    """What can wait for the copies of one device."""

    def settle(self) -> None:
        """See `Transfers`."""


def settle_all(transfers: Mapping[torch.device, Settles]) -> None:
    """Let the processor wait for all copies of all devices, and for all other work of the devices."""
    for device, copies in transfers.items():
        copies.settle()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
