"""Programs that are in order, under a stalloc with one fault, which the checker of the order of work has to find.

`python planted_faults.py PROGRAM [FAULT]` prints the sentences of what was found as JSON. A fault stands in for one
function of stalloc's from the moment at which the program begins.
"""

import contextlib
import ctypes
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stalloc import device

device.activate("virtual", device.VirtualGPU(total_bytes=210 << 20))

import torch  # noqa: E402

import stalloc  # noqa: E402
from stalloc.compaction import emptying, torch_storages  # noqa: E402
from stalloc.device import mapped_pages, ordering, virtual  # noqa: E402
from stalloc.runtime import Settings, captures, sources  # noqa: E402
from stalloc.techniques import transfers  # noqa: E402

MIB = 1 << 20
FAULTS: dict[str, Callable[[], None]] = {}
KEPT: list[Any] = []


def fault(function: Callable[[], None]) -> Callable[[], None]:
    FAULTS[function.__name__] = function
    return function


def nothing(*_: Any, **__: Any) -> None:
    return None


# --- programs ----------------------------------------------------------------------------------------------------


def fill(size: int) -> Any:
    return torch.ones(size, dtype=torch.uint8, device="cuda")


def pages() -> None:
    """Pages move, since each phase needs other sizes than the last one on a card that holds little more than one."""
    for step in range(12):
        live = [fill(size * MIB) for size in ((30, 40, 50) if step % 2 else (100, 9, 13))]
        del live
        if step % 3 == 2:
            torch.cuda.empty_cache()


def streams() -> None:
    """Blocks of three streams, which are waited for, and recorded where one frees what another still uses."""
    own, used = torch.cuda.current_stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
    source, results = fill(12 * MIB), {}
    for stream in used:
        stream.wait_stream(own)
    everyone = [own, *used]
    for stream in everyone:
        with torch.cuda.stream(stream):
            results[stream] = torch.empty(12 * MIB, dtype=torch.uint8, device="cuda")
    for _ in range(10):
        rng, live = random.Random(0), []
        for _ in range(100):
            if live and rng.random() < 0.45:
                live.pop(rng.randrange(len(live)))
                continue
            stream, other = rng.sample(everyone, 2)
            size = rng.choice([70_000, 900_000, 3_000_000, 12 * MIB])
            with torch.cuda.stream(stream):
                block = torch.empty(size, dtype=torch.uint8, device="cuda")
                block.copy_(source[:size])
            if rng.random() < 0.4:
                other.wait_stream(stream)
                with torch.cuda.stream(other):
                    results[other][:size].copy_(block)
                block.record_stream(other)
            live.append(block)
        del live, block
        stalloc.step()


def graph() -> None:
    """A graph is captured, which needs memory of its own, while blocks are freed that another stream uses."""
    side, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    static, blocks = fill(MIB), [fill(2 * MIB) for _ in range(20)]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for block in blocks:
            block.add_(1)
            block.record_stream(side)
    del block
    with torch.cuda.graph(captured):
        blocks.clear()
        for _ in range(80):
            static + 1
        result = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").add_(1)
    captured.replay()
    del result


def layers() -> None:
    """Layers that come from the host as they compute, and go back."""
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).cuda()
    stalloc.stream_layers(model, window=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(8, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def side_work(tensors: list[Any]) -> torch.cuda.Stream:
    """A stream that has been given work on tensors, for which nobody waits."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for one in tensors:
            one.add_(1)
    return side


def asleep() -> None:
    """The program sleeps while a stream is still at work."""
    live = [fill(6 * MIB) for _ in range(4)]
    side = side_work(live)
    stalloc.sleep()
    stalloc.wake()
    torch.cuda.current_stream().wait_stream(side)
    live[0].add_(1)


def moved() -> None:
    """What lives between holes is moved together while a stream is still at work on it."""
    live = [fill(3 * MIB) for _ in range(60)][::3]
    torch.cuda.empty_cache()  # which waits: what it gives back is not given back later
    side = side_work(live)
    assert stalloc.compact(live).num_moved
    torch.cuda.current_stream().wait_stream(side)
    live[0].add_(1)


# --- faults ------------------------------------------------------------------------------------------------------


@fault
def unmaps_without_waiting() -> None:
    sources.PoolSource.wait = nothing  # type: ignore[method-assign]


@fault
def unmaps_too_much() -> None:
    unmap = mapped_pages.PageRange.unmap

    def one_more(self: Any, address: int, size_bytes: int) -> None:
        unmap(self, address, size_bytes)
        driver().cuMemUnmap(address, mapped_pages.PAGE_BYTES)

    mapped_pages.PageRange.unmap = one_more  # type: ignore[method-assign]


@fault
def maps_over_a_mapping() -> None:
    own = mapped_pages.PageRange.map

    def again(self: Any, address: int, size_bytes: int) -> bool:
        done = own(self, address, size_bytes)
        driver().cuMemMap(address, mapped_pages.PAGE_BYTES, 0, self.page_identity(address), 0)
        return done

    mapped_pages.PageRange.map = again  # type: ignore[method-assign]


@fault
def frees_addresses_that_have_memory() -> None:
    mapped_pages.Pages.unmap = nothing  # type: ignore[method-assign]


@fault
def gives_a_page_out_twice() -> None:
    own, first = mapped_pages.PageRange.map, {}

    def the_first_again(self: Any, address: int, size_bytes: int) -> bool:
        done = own(self, address, size_bytes)
        for at in range(address, address + size_bytes, mapped_pages.PAGE_BYTES):
            handle = first.setdefault("handle", self.page_identity(address))
            driver().cuMemUnmap(at, mapped_pages.PAGE_BYTES)
            driver().cuMemMap(at, mapped_pages.PAGE_BYTES, 0, handle, 0)
        return done

    mapped_pages.PageRange.map = the_first_again  # type: ignore[method-assign]


def driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    address, size = ctypes.c_uint64, ctypes.c_size_t
    library.cuMemUnmap.argtypes = address, size
    library.cuMemMap.argtypes = address, size, size, address, ctypes.c_uint64
    return library


def stand_in(name: str, function: Callable[[int, int, int], int]) -> None:
    """Have the core call a function in place of one of the driver's that order streams."""
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)(function)
    KEPT.append(callback)
    real = ordering.ordering()
    assert real is not None
    changed = replace(real, **{name: ctypes.cast(callback, ctypes.c_void_p).value})
    for controller in KEPT[0].controllers:
        controller.state.order_streams(changed)


@fault
def hands_over_without_waiting() -> None:
    stand_in("wait_event", lambda *_: 0)


@fault
def takes_every_event_for_done() -> None:
    stand_in("query_event", lambda *_: 0)


@fault
def records_on_the_wrong_stream() -> None:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuEventRecord.argtypes = ctypes.c_void_p, ctypes.c_void_p
    stand_in("record_event", lambda event, *_: int(library.cuEventRecord(event, None)))


@fault
def does_not_hear_of_captures() -> None:
    captures.Captures.begin = nothing  # type: ignore[method-assign]
    stand_in("exchange_mode", lambda *_: 0)


@fault
def maps_in_a_capture_without_leave() -> None:
    sources.relaxed_capture = contextlib.nullcontext


@fault
def maps_without_access() -> None:
    mapped_pages.Pages._allow = lambda *_: 0  # type: ignore[method-assign]


@fault
def sleeps_without_waiting() -> None:
    sources.PoolSource.wait = nothing  # type: ignore[method-assign]


@fault
def moves_without_waiting() -> None:
    torch_storages.wait_for = emptying.wait_for = nothing


@fault
def computes_before_weights_arrive() -> None:
    transfers.Transfers.wait = nothing  # type: ignore[method-assign]


@fault
def copies_before_weights_are_done() -> None:
    def copy(self: Any, pairs: Any, *, to_device: bool) -> Any:
        return self._enqueue(pairs, "", to_device=to_device)

    transfers.Transfers._copy = copy  # type: ignore[method-assign]


def main() -> None:
    program, *names = sys.argv[1:]
    share = program == "streams"
    KEPT.append(stalloc.install(settings=Settings(streams="share") if share else None))
    torch.zeros(1, device="cuda")
    for name in names:
        FAULTS[name]()
    with contextlib.suppress(RuntimeError):  # what the driver refuses
        globals()[program]()
    checker = virtual.order_checker()
    assert checker is not None
    print(json.dumps([one.text for one in checker.found()]))


if __name__ == "__main__":
    main()
