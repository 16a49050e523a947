"""Copies as in `Transfers`, each in this process's turn on a link that it shares with others.

Contract: a copy is asked for at once and made by a thread when its turn has come, so the program goes on meanwhile; it
is waited for where `Transfers` is: there the program waits until the copy has begun, and its stream until it is over.
The thread holds nothing of the device any more by then.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from stalloc.techniques.device_threads import threads_at
from stalloc.techniques.link_turns import LinkTurns
from stalloc.techniques.transfers import Pair, Transfers, current_phase

_thread = threading.local()


def is_copying() -> bool:
    """Whether the calling thread makes copies, so that it must not wait for any."""
    return getattr(_thread, "makes_copies", False)


class TransfersInTurn:
    """The copies of one device, each made in this process's turn."""

    def __init__(self, device: torch.device, turns: LinkTurns) -> None:
        self._transfers, self._turns = Transfers(device), turns
        self._device = device
        ways = ("to-host", "to-device") if device.type == "cuda" else ()
        self._threads = [threads_at(device, 1, f"stalloc-{way}", _begin_thread) for way in ways]

    def to_device(self, pairs: Sequence[Pair]) -> Any:
        """See `Transfers`."""
        return self._copy(pairs, to_device=True)

    def to_host(self, pairs: Sequence[Pair]) -> Any:
        """See `Transfers`."""
        return self._copy(pairs, to_device=False)

    def wait(self, begun: Any, stream: Any = None) -> None:
        """See `Transfers`."""
        if begun is not None:
            self._transfers.wait(begun.result(), stream)

    def settle(self) -> None:
        """Let the processor wait for all copies."""
        for thread in self._threads:
            thread.submit(int).result()

    def _copy(self, pairs: Sequence[Pair], *, to_device: bool) -> Any:
        if not self._threads:
            with self._turns.turn(to_device=to_device):
                self._transfers.copy_all(pairs, current_phase(), to_device=to_device)
            return None
        ready = torch.cuda.current_stream(self._device).record_event()
        begun: Future[Any] = Future()
        self._threads[to_device].submit(self._copy_in_turn, list(pairs), ready, current_phase(), begun, to_device)
        return begun

    def _copy_in_turn(
        self, pairs: list[Pair], ready: Any, of_phase: str, begun: "Future[Any]", to_device: bool
    ) -> None:
        try:
            ready.synchronize()  # before a turn is asked for, which is for copying alone
            with self._turns.turn(to_device=to_device):
                event = self._transfers.copy_all(pairs, of_phase, to_device=to_device)
                pairs.clear()
                begun.set_result(event)
                event.synchronize()
        except BaseException as error:
            pairs.clear()
            if begun.done():
                raise
            begun.set_exception(error)


def _begin_thread() -> None:
    _thread.makes_copies = True
