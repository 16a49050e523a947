"""torch through its pluggable allocator: compiled callbacks, and steps from its optimizers.

torch takes a pluggable allocator only before CUDA is first used, and never gives it back. What torch then refuses to
answer (statistics, peaks, histories) is answered in torch_answers.

Contract: once torch is served, a program whose backward passes are over ends with its own code. A backward pass returns
to the program before the thread that ran it has dropped what it still refers to. If the interpreter has ended by then,
the thread is ended inside a C++ destructor, and with it the process: "terminate called without an active exception",
exit code 134, under any allocator.
"""

import atexit
import contextlib
import ctypes
import sys
import time
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from stalloc.core.entry import link, torch_entries, torch_record_stream
from stalloc.errors import SetupError
from stalloc.integrations import torch_answers
from stalloc.integrations.graph_pools import Replays
from stalloc.integrations.installation import installation
from stalloc.integrations.leading_optimizers import LeadingOptimizers
from stalloc.runtime import Runtime
from stalloc.runtime.captures import Captures
from stalloc.runtime.interruptions import persistent_entry

_keep: list[Any] = []  # what torch holds addresses of
_LOOK_EVERY = 64  # steps, after which the devices of an optimizer's parameters are looked up again
_INT = 0x7FFF_FFFF  # the bits of a C int in a word
_BACKWARD_THREADS = "pt_autograd"  # and the number of the device
_LOOK_SECONDS = 0.001  # between two looks; Python's lock is free meanwhile
_PATIENCE_SECONDS = 1.0  # a pass that another thread of the program has begun may go on for ever


def check_untouched() -> None:
    """Raise SetupError, naming what holds CUDA memory, if torch has used CUDA: its allocator cannot be changed then."""
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return
    found = _holders(torch)
    held = f" ({', '.join(found)} of the program {'hold' if len(found) > 1 else 'holds'} it)" if found else ""
    raise SetupError(
        f"torch has used CUDA before stalloc was installed{held}: call stalloc.install() before the first CUDA tensor, "
        "or start the program with `stalloc run` or STALLOC=1; from here on only stalloc.mem_pool() can serve torch."
    )


def _holders(torch: Any) -> list[str]:
    """Names in the program's main module that hold CUDA memory, as a trace of who used it."""
    found = []
    for name, value in list(vars(sys.modules.get("__main__", sys)).items()):
        tensors = value.parameters() if isinstance(value, torch.nn.Module) else [value]
        if any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors):
            found.append(name)
    return found[:3]


def install(runtime: Runtime, stepped: Callable[[Collection[int]], None]) -> bool:
    """Make stalloc torch's CUDA allocator; `stepped` is called with the devices on which a step of the program ended.

    False if this torch has no CUDA. Raises SetupError if CUDA was used already, or this torch cannot be served.
    """
    import torch

    if not torch.backends.cuda.is_built():
        return False  # a CPU build: nothing to serve
    check_untouched()
    try:
        allocate, free = torch_entries(
            runtime.states.ctypes.data, Path(torch.__file__).parent, runtime.entries, runtime.call_sites.malloc_word
        )
    except OSError as error:
        raise SetupError(
            f"stalloc cannot serve torch {torch.__version__}: {str(error).removeprefix('stalloc: ')} Use torch 2.1 or "
            "a later one from its wheels, or run without stalloc."
        ) from None
    allocator = torch._C._cuda_customAllocator(allocate, free)
    _set_callbacks(allocator, runtime)
    torch_answers.answer_cache_info(torch, allocator)
    try:
        torch.cuda.memory.change_current_allocator(torch.cuda.memory._CUDAAllocator(allocator))
    except RuntimeError:  # which torch.cuda.is_initialized() does not say
        raise SetupError(
            "torch has initialised its allocator already, as it does when memory is made pinned (pin_memory=True): "
            "call torch.cuda.init() before."
        ) from None
    torch_answers.install(torch, runtime)
    installation.replays = Replays(torch, runtime)
    _watch_optimizers(runtime, stepped)
    _keep.append(allocator)
    atexit.unregister(_wait_for_backward)  # once, however often this is called
    atexit.register(_wait_for_backward)
    return True


class _Devices:
    """The devices of the parameters of optimizers, looked up anew when their number has changed, or now and then."""

    def __init__(self, num_devices: int) -> None:
        self._all = frozenset(range(num_devices))
        self._known: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Any) -> frozenset[int]:
        """The indices; all where none of its parameters is on a GPU (so far)."""
        if len(self._all) == 1:
            return self._all
        groups = [group["params"] for group in optimizer.param_groups]
        number, known = sum(map(len, groups)), self._known.setdefault(optimizer, [0, 0, self._all])
        known[1] -= 1
        if known[0] != number or known[1] <= 0:
            found = {one.device.index for group in groups for one in group if one.is_cuda}
            known[:] = number, _LOOK_EVERY if found else 0, frozenset(found) or self._all
        devices: frozenset[int] = known[2]
        return devices


def _watch_optimizers(runtime: Runtime, stepped: Callable[[Collection[int]], None]) -> None:
    """Let optimizers mark steps, say as soon as there is one that marks will come, and when it makes its state.

    All of that belongs to the devices of its parameters: another GPU's program may be anywhere in its step.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from stalloc.techniques.appearing import when_optimizers_are_made

    devices = _Devices(len(runtime.controllers))
    leaders = LeadingOptimizers(lambda device: runtime.controllers[device].state.requested_ever_bytes)
    known: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have stepped: some never have any state

    def about_to_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not optimizer.state and optimizer not in known:
            known.add(optimizer)
            runtime.expect_persistent(devices.of(optimizer))
        leaders.begin_step(optimizer)

    def has_stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        its = devices.of(optimizer)
        led = leaders.devices_led(optimizer, its)
        if len(led) < len(its):
            runtime.end_persistent(its - led)
        if led:
            stepped(led)

    register_optimizer_step_pre_hook(about_to_step)
    register_optimizer_step_post_hook(has_stepped)
    when_optimizers_are_made(lambda optimizer: runtime.expect_marks(devices.of(optimizer)))


def _set_callbacks(allocator: Any, runtime: Runtime) -> None:
    """What torch asks for besides memory; what is rare may be Python."""
    controllers = runtime.controllers

    def empty_cache(*_: int) -> int:
        for controller in controllers:
            controller.memory.wait_for_deferred()  # as torch does
            controller.memory.release_unused()
        return 1

    def of_captures(act: Callable[[Captures, tuple[int, int]], object]) -> int:
        # what is interrupted is done all the same, or memory would be used again too soon: each may be done twice
        def handle(device: int, first: int, second: int) -> int:
            act(controllers[device & _INT].captures, (first, second))
            return 1

        return persistent_entry(handle)

    begin = of_captures(lambda captures, pool: captures.begin(pool))
    end = of_captures(lambda captures, _: captures.end())
    if hasattr(allocator, "set_begin_allocate_to_pool"):
        allocator.set_begin_allocate_to_pool(begin)
        allocator.set_end_allocate_to_pool_fn(end)
    else:  # torch before 2.3
        (begin,) = link(__package__, "torch_older.ll", "begin_stream_capture", set_to={"begin_capture": begin})
        allocator.set_begin_allocate_stream_to_pool(begin)
        allocator.set_end_allocate_stream_to_pool_fn(end)
    allocator.set_record_stream_fn(torch_record_stream(runtime.states))
    allocator.set_reset_fn(persistent_entry(empty_cache))
    allocator.set_release_pool(of_captures(lambda captures, pool: captures.release(pool)))
    callback = ctypes.CFUNCTYPE(None, ctypes.c_double, ctypes.c_int)(
        lambda fraction, device: controllers[device].memory.limit(fraction)
    )
    _keep.append(callback)
    allocator.set_memory_fraction_fn(ctypes.cast(callback, ctypes.c_void_p).value)


def _wait_for_backward() -> None:
    """Wait until its threads are idle, a second at most."""
    end, seen = time.monotonic() + _PATIENCE_SECONDS, _states()
    while seen and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        before, seen = seen, _states()
        if seen == before and all(state.startswith("State:\tS") for state in seen.values()):
            return


def _states() -> dict[str, str]:
    """By autograd thread, whether it sleeps and how often it has stopped; empty where the system does not say."""
    found = {}
    for status in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # that thread has just ended
            lines = status.read_text().splitlines()
            if lines[0].startswith(f"Name:\t{_BACKWARD_THREADS}"):
                found[status.parent.name] = " ".join(line for line in lines if line.startswith(("State", "voluntary")))
    return found
