"""The runtime of this process: a controller a device, one table of states that the C entry points go by.

Contract: made once, never torn down, since torch and CuPy hold addresses into it for as long as the process lives.
"""

import contextlib
import ctypes
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numba.core.compiler_lock import global_compiler_lock

from stalloc import device as devices
from stalloc.core import constants, entry
from stalloc.core.snapshot import live_addresses
from stalloc.errors import PlanError
from stalloc.imports import begin_use
from stalloc.planner import Plan
from stalloc.printable import printable
from stalloc.runtime.call_sites import CallSites
from stalloc.runtime.controller import Controller
from stalloc.runtime.interruptions import driver_status, is_interruption
from stalloc.runtime.runtime_settings import Phase, Settings
from stalloc.runtime.sources import PoolSource
from stalloc.runtime.statistics import Report, report
from stalloc.trace import MARK_STEP

if TYPE_CHECKING:
    from stalloc.poison.poison import Watch
    from stalloc.runtime.planning_job import Planner
    from stalloc.trace import Trace

_MAX_DEVICES = 128
_MAX_LOAN_CALLS = 1 << 16  # after so many it is not known any more who has borrowed a block
_FORKED = (
    "stalloc: this process was forked from one that had CUDA in use, which CUDA does not allow: start it with the "
    "'spawn' method (multiprocessing.get_context('spawn')), or use CUDA in the child only."
)


class Runtime:
    """All devices of this process under stalloc."""

    def __init__(self, settings: Settings, plans: list[Plan] | None = None, planner: "Planner | None" = None) -> None:
        """`planner` stands in for `plan_schedule`, say to take another rank's plan; it is called in any thread.

        Raises PlanError if a plan does not fit, SetupError if there is no device or no CuPy."""
        self.states = np.zeros(_MAX_DEVICES, np.int64)
        slow = entry.slow_entry(self._help, self._help_again)
        #: the same for Python code that has to be done as a whole, whatever interrupts it
        self._enter = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(slow)
        self._names: dict[int, str] = {}  # of marks that are being made
        self._numbers = itertools.count()
        #: where memory is poisoned; None unless STALLOC_POISON asks for it
        self.watch: Watch | None = None
        if os.environ.get("STALLOC_POISON", "") not in ("", "0"):
            from stalloc.poison import poison

            self.watch = poison.Watch()
        by_pages = settings.arena == "pages"
        self.controllers = [
            Controller(device, PoolSource(device, by_pages=by_pages), slow, settings, self.watch, planner)
            for device in devices.devices()
        ]
        #: the addresses that torch and CuPy reach the core by: `int64 (state, bytes, stream)`, `void (state, address)`
        self.entries = entry.core_entries()
        if self.watch is not None and self.watch.devices:
            self.entries = entry.slow_entry(self.watch.allocate), entry.free_by(entry.slow_entry(self.watch.free))
        #: who asks for what; the word that it holds is what torch and CuPy call by
        self.call_sites = CallSites(self.entries[0])
        for controller in self.controllers:
            self.states[controller.device.index] = controller.state.address
            controller.captures.loans.places_of = partial(self._places_of, controller.state.address)
        self._loan_sites = CallSites(self.entries[0], _MAX_LOAN_CALLS)  # the same of late, while somebody borrows
        self._num_borrowing = 0  # such blocks of the program
        self._loan_lock = threading.Lock()
        self._always_sited = settings.call_sites
        self._refusal, self._refuse = "", 0  # why no request is served, and the malloc that says so
        if settings.call_sites:
            self.begin_call_sites()
        for plan in plans or []:
            if plan.device >= len(self.controllers):
                raise PlanError(
                    f"the plan is for device {plan.device}, but there are {len(self.controllers)} devices: "
                    "make it from a trace of this machine's devices."
                )
            self.controllers[plan.device].use(plan)
        self.pid = os.getpid()
        #: makes room at marks: (device, bytes that were lacking, whether less is of use too); None: nothing may move
        self.room_maker: Callable[[int, int, bool], None] | None = None
        #: called with (device, bytes asked for, bytes allocated, bytes free on the device) when memory is refused
        self.observers: list[Callable[[int, int, int, int], None]] = []
        entry.keep_whole_at_fork(self.states.ctypes.data, _MAX_DEVICES)
        # a thread that compiles, like the planner's, is waited for: the child could not compile anything otherwise
        lock = global_compiler_lock
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
        os.register_at_fork(after_in_child=self._forked)

    def begin_call_sites(self) -> None:
        if not self.call_sites.is_on:
            self.call_sites.begin()
            for controller in self.controllers:
                controller.recording.name_call_sites(self.call_sites)

    def end_call_sites(self) -> None:
        if not self._always_sited:
            self.call_sites.end()

    def begin_borrowing(self) -> None:
        with self._loan_lock:
            self._num_borrowing += 1
            self._loan_sites.begin()
            self.call_sites.stand_in(self._loan_sites.malloc)

    def end_borrowing(self) -> None:
        with self._loan_lock:
            self._num_borrowing -= 1
            if self._num_borrowing == 0:
                self.call_sites.stand_in(0)

    def _places_of(self, state: int, addresses: list[int]) -> list[str]:
        sites = self.call_sites if self.call_sites.is_on else self._loan_sites
        return sites.names_at(state, addresses)

    def refuse_requests(self, sentence: str) -> None:
        """Answer every request with an out-of-memory error that says so, and ignore marks, until `serve_requests`."""
        self._refusal = f"stalloc: {sentence}"
        self._refuse = self._refuse or entry.slow_entry(self._refuse_one)
        self.call_sites.refuse(self._refuse)

    def _refuse_one(self, state: int, *_: int) -> int:
        for controller in self.controllers:
            if controller.state.address == state:
                controller.state.set_out_of_memory_text(self._refusal)
        return 0

    def serve_requests(self) -> None:
        self._refusal = ""
        self.call_sites.refuse(0)

    def _forked(self) -> None:
        """In a child of fork: no other thread is here, whatever it was doing; serve from the heap, without a plan.

        A real device cannot be used in the child of a process that used it (CUDA programming guide); the virtual one
        can. The tables are whole: see `keep_whole_at_fork`.
        """
        for controller in self.controllers:
            controller.begin_in_child()
        if self.watch is not None:
            self.watch.forked()

    def try_plans(self, plans: list[Plan]) -> None:
        """Put plans of an earlier run in force where they fit; those that do not are left aside.

        To be called before the first allocation. A plan that turns out not to fit the program is dropped by the
        controller, as any plan is.
        """
        for plan in plans:
            if plan.device >= len(self.controllers):
                continue
            controller = self.controllers[plan.device]
            try:
                controller.use(plan)
            except Exception as error:
                if not isinstance(error, PlanError) and not driver_status(error):  # this run may not use that device
                    raise
                controller.watch_anew()
                controller.status.note = f"the plan of the last run was not used: {error}"

    def rest(self) -> None:
        for controller in self.controllers:
            controller.drop_plan()
            controller.memory.release_unused()

    def resume(self) -> None:
        for controller in self.controllers:
            if controller.status.phase is Phase.RESTING:
                controller.watch_anew()

    def _help(self, device: int, request: int, argument: int, tell: bool = True) -> int:
        if os.getpid() != self.pid and self.controllers[0].device.kind == "cuda":
            self.controllers[device].state.set_out_of_memory_text(_FORKED)
            return 0
        controller = self.controllers[device]
        if request & ((1 << constants.REASON_BITS) - 1) == constants.MARK:
            if (name := self._names.pop(argument, None)) is not None:  # else it was interrupted in the middle
                controller.hear_mark(request >> constants.REASON_BITS, name)
            return 1
        if request == constants.OUT_OF_MEMORY:
            if tell:
                self._tell_observers(device, argument)
            return 0
        return int(controller.help(request, argument))

    def _help_again(self, device: int, request: int, argument: int, errors: list[BaseException]) -> int:
        """An error stopped the slow path: leave the allocator usable, and let the program hear of it.

        An interruption stays in `errors`, to be raised where the program goes on; the request is served all the same.
        """
        error = errors[-1]
        controller = self.controllers[device]
        with contextlib.suppress(Exception):
            controller.recover(request, argument, error)
        if isinstance(error, RecursionError) and len(errors) == 1:
            helped = self._help(device, request, argument)  # with more room this time
            errors.pop()
            return helped
        if is_interruption(error):
            return self._help(device, request, argument, tell=False)  # an observer may have raised it
        with contextlib.suppress(Exception):
            warnings.warn(
                f"stalloc: the allocator's slow path failed ({type(error).__name__}: {printable(str(error))}); "
                "the heap goes on serving without a plan.",
                RuntimeWarning,
                stacklevel=2,
            )
        errors[:] = [one for one in errors if is_interruption(one)]
        return 0

    def _tell_observers(self, device: int, size_bytes: int) -> None:
        if self.observers:
            controller = self.controllers[device]
            free, _ = controller.device.memory_info()
            for observer in list(self.observers):
                observer(device, size_bytes, controller.state.record.total.allocated_bytes, free)

    def mark(self, kind: int, name: str, devices: Collection[int] | None = None) -> None:
        """Note a mark on every device that the program has used, of those named if any are.

        Raises CorruptionError where STALLOC_POISON=1 has found something.
        """
        for controller in () if self._refusal else self.controllers:
            is_meant = devices is None or controller.device.index in devices
            if is_meant and kind == MARK_STEP and controller.steady.ends_step(name):
                continue
            if is_meant and controller.state.record.total.num_allocs:
                number = next(self._numbers)
                self._names[number] = name
                self._enter(controller.device.index, constants.MARK | kind << constants.REASON_BITS, number)
                if kind == MARK_STEP and self.room_maker is not None and not controller.memory.is_captured_now():
                    lacking, for_arena = controller.shortage.take_lacking()
                    if lacking:
                        self.room_maker(controller.device.index, lacking, for_arena)
        if self.watch is not None:
            self.watch.raise_found()
        if self.call_sites.is_look_due:
            self.call_sites.keep_live({one.state.address: live_addresses(one.state) for one in self.controllers})

    def allow_moving(self, room_maker: "Callable[[int, int, bool], None] | None") -> None:
        """Let `room_maker` move what lives at marks of steps when memory was short; None: no longer."""
        self.room_maker = room_maker
        for controller in self.controllers:
            controller.may_move = room_maker is not None
            controller.shortage.take_lacking()

    def expect_marks(self, devices: Collection[int]) -> None:
        for index in devices:
            self.controllers[index].expects_marks = True

    def expect_persistent(self, devices: Collection[int]) -> None:
        for index in devices:
            self.controllers[index].expect_persistent()

    def end_persistent(self, devices: Collection[int]) -> None:
        """What is allocated on these devices from here on is not meant to last, although no step has ended."""
        for controller in map(self.controllers.__getitem__, devices):
            with controller.lock:
                controller.persistent.end()

    def recorded(self) -> "list[Trace]":
        for one in self.controllers:
            one.steady.end()
        return [one.recording.trace() for one in self.controllers if one.state.record.log.num_events]

    def reports(self) -> list[Report]:
        records = ((one, one.state.record) for one in self.controllers)
        return [report(one) for one, record in records if record.total.num_allocs or record.statistics.num_ooms]


_runtime: Runtime | None = None
_runtime_lock = threading.Lock()


def start(settings: Settings, plans: list[Plan] | None = None, planner: "Planner | None" = None) -> Runtime:
    """The runtime of this process, made at the first call; later calls get the same one. Errors as in `Runtime`."""
    global _runtime
    with _runtime_lock:
        if _runtime is None:
            _runtime = Runtime(settings, plans, planner)
        return _runtime


def current() -> Runtime | None:
    return _runtime


def needed() -> Runtime | None:
    """The runtime of this process, started now if it was to start at the program's first use of CUDA; None: none."""
    if _runtime is None:
        begin_use()
    return _runtime
