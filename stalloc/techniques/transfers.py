"""Copies between the device and the host, on two streams beside the program's own.

Contract: copies of one direction run in the order in which they were asked for. Memory of the device that a copy uses
is let go only after `wait` has made the program's stream wait for it: at fixed points of the program, so that steps
repeat, and never by record_stream. Each device has its two streams once. Without a GPU a copy is made at once.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

from stalloc.techniques.link_turns import LinkTurns

Pair = tuple[torch.Tensor, torch.Tensor]
"""The tensor to write, and the tensor to read."""
_streams: dict[int, tuple[Any, Any]] = {}
_IN_TURN = "stalloc-in-turn"  # begins the names of threads that make copies in turn


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


class Transfers:
    """The copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_device = self._to_host = None
        self._last: Any = None  # event after the last copy to the host
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            if index not in _streams:
                _streams[index] = torch.cuda.Stream(index), torch.cuda.Stream(index)
            self._to_device, self._to_host = _streams[index]

    def to_device(self, pairs: Sequence[Pair]) -> Any:
        """Copy from the host, after what the program's stream has to do so far; the event returned is for `wait`."""
        return self._copy(pairs, to_device=True)

    def to_host(self, pairs: Sequence[Pair]) -> Any:
        """Copy to the host, after what the program's stream has to do so far; the event returned is for `wait`."""
        event = self._copy(pairs, to_device=False)
        self._last = event if event is not None else self._last
        return event

    def follow(self) -> None:
        """Let copies that are made from here on, in any thread, come after the work that the program has queued."""
        for stream in (self._to_device, self._to_host):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(stream.device))

    def by_threads(self) -> "Callable[[torch.Tensor, torch.Tensor], None]":
        """What copies to a tensor from another, and waits, in any thread: after the work that the program has queued by
        now, for the phase that it is in."""
        self.follow()
        of_phase = _phase

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            if (event := self._enqueue([(target, source)], of_phase, to_device=target.is_cuda)) is not None:
                event.synchronize()

        return copy

    def wait(self, event: Any, stream: Any = None) -> None:
        """Let the program's stream wait for copies: the current one, or another."""
        if event is not None:
            (stream or torch.cuda.current_stream()).wait_event(event)

    def settle(self) -> None:
        """Let the processor wait for all copies to the host, before it looks at what they write."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def _copy(self, pairs: Sequence[Pair], *, to_device: bool) -> Any:
        stream = self._to_device if to_device else self._to_host
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return self._enqueue(pairs, _phase, to_device=to_device)

    def _enqueue(self, pairs: Sequence[Pair], of_phase: str, *, to_device: bool) -> Any:
        stream: Any = self._to_device if to_device else self._to_host
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
            copied = Copied(stream.device.index, to_device, num_bytes, of_phase, begin, end)
            for listener in listeners:
                listener(copied)
        return end


class TransfersInTurn(Transfers):
    """Copies of one device, each in this process's turn on a link that it shares with others. A copy is asked for at
    once and made by a thread when its turn has come, so the program goes on meanwhile; where it is waited for the
    program waits until the copy has begun, and its stream until it is over. The thread holds nothing of the device any
    more by then."""

    def __init__(self, device: torch.device, turns: LinkTurns) -> None:
        super().__init__(device)
        self._turns = turns
        ways = ("to-host", "to-device") if device.type == "cuda" else ()
        self._threads = [threads_at(device, 1, f"{_IN_TURN}-{way}") for way in ways]

    def wait(self, event: Any, stream: Any = None) -> None:
        if event is not None:
            super().wait(event.result(), stream)

    def settle(self) -> None:
        for thread in self._threads:
            thread.submit(int).result()

    def _copy(self, pairs: Sequence[Pair], *, to_device: bool) -> Any:
        if not self._threads:
            with self._turns.turn(to_device=to_device):
                return self._enqueue(pairs, _phase, to_device=to_device)
        ready = torch.cuda.current_stream(self._device).record_event()
        begun: Future[Any] = Future()
        self._threads[to_device].submit(self._copy_in_turn, list(pairs), ready, _phase, begun, to_device)
        return begun

    def _copy_in_turn(
        self, pairs: list[Pair], ready: Any, of_phase: str, begun: "Future[Any]", to_device: bool
    ) -> None:
        try:
            ready.synchronize()  # before a turn is asked for, which is for copying alone
            with self._turns.turn(to_device=to_device):
                event = self._enqueue(pairs, of_phase, to_device=to_device)
                pairs.clear()
                begun.set_result(event)
                event.synchronize()
        except BaseException as error:
            pairs.clear()
            if begun.done():
                raise
            begun.set_exception(error)


class DeviceTransfers(dict[torch.device, Transfers]):
    """The copies of each device, made as they are first asked for; with `turns`, each in turn with other processes."""

    def __init__(self, turns: LinkTurns | None = None) -> None:
        super().__init__()
        self._turns = turns

    def __missing__(self, device: torch.device) -> Transfers:
        self[device] = Transfers(device) if self._turns is None else TransfersInTurn(device, self._turns)
        return self[device]

    def settle(self) -> None:
        """Let the processor wait for all copies of all devices, and for all other work of the devices."""
        for device, copies in self.items():
            copies.settle()
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def is_copying() -> bool:
    """Whether the calling thread makes copies in turn, so that it must not wait for any."""
    return threading.current_thread().name.startswith(_IN_TURN)


def threads_at(device: torch.device, number: int, name: str) -> ThreadPoolExecutor:
    """So many threads whose current device is `device`. A thread is at GPU 0 by default, where leaving a stream of
    another one would put it back, and with it a context on a GPU that may be another process's."""
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()

    begin = None if index is None else functools.partial(torch.cuda.set_device, index)
    return ThreadPoolExecutor(number, thread_name_prefix=name, initializer=begin)
