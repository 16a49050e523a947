"""A program on streams of its own under the checker of the order of work, with random events, captures and plans.

Contract: whatever is drawn, the program is in order: a stream waits for those that wrote what it reads, and for those
that used what it writes; what other streams use is waited for, or noted as torch's record_stream does it, before it is
freed. So each finding is stalloc's fault. Steps are drawn once and repeated, so that plans come into force, and differ
now and then; captures are announced as torch's and CuPy's are, or made without telling anybody.
"""

import ctypes
import math
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from running.soak_cycles import not_zero
from running.soak_device import Result
from stalloc.core.entry import cupy_entries
from stalloc.runtime.controller import MARK_STEP
from stalloc.runtime.process import start
from stalloc.runtime.runtime_settings import Phase, Settings

NUM_STREAMS, NUM_EVENTS, MOST_GRAPHS = 4, 64, 3
LARGEST = 6 << 20
NEW, USE, COPY, FREE = range(4)
SHARED, WAITED, SYNCHRONIZED = range(3)  # how what other streams use is freed
_STEPS_OF_A_RECIPE = 40
_SLOT_OF_NONE = -1
_MAX_FOUND = 20


@dataclass(eq=False)
class _Block:
    address: int
    size_bytes: int
    home: Any  # stream
    uses: dict[Any, bool] = field(default_factory=dict)  # by other stream: whether it wrote


@dataclass(eq=False)
class _Graph:
    handle: int
    stream: Any  # whose memory it has
    pool: tuple[int, int] | None  # of an announced capture
    blocks: list[_Block]


class OrderSoak:
    """One device and one program; STALLOC_VIRTUAL_ORDER=strict has to be set."""

    def __init__(self, seed: int, total_bytes: int = 192 << 20) -> None:
        from stalloc import device as devices
        from stalloc.device import VirtualGPU, virtual

        devices.activate("virtual", VirtualGPU(total_bytes=total_bytes))
        import cupy

        self.seed, self.rng, self.counts = seed, random.Random(seed), Counter[str]()
        self.checker = virtual.order_checker()
        settings = Settings(planning_share=math.inf, max_plans=1 << 40, streams="share")
        self.runtime = start(settings)
        self.controller = self.runtime.controllers[0]
        self.state = self.controller.state
        allocate, free = cupy_entries(self.runtime.states.ctypes.data)
        word = ctypes.c_size_t
        self._allocate = ctypes.CFUNCTYPE(word, word, word, ctypes.c_int)(allocate)
        self._free = ctypes.CFUNCTYPE(None, word, word, ctypes.c_int)(free)
        self._cuda, self._make_stream = cupy.cuda.runtime, cupy.cuda.Stream
        self._streams = [self._make_stream(non_blocking=True) for _ in range(NUM_STREAMS)]
        self._events = [self._cuda.eventCreateWithFlags(self._cuda.eventDisableTiming) for _ in range(NUM_EVENTS)]
        self._blocks: dict[int, _Block] = {}  # by slot of the recipe
        self._graphs: list[_Graph] = []
        self._num_events = self._num_captures = 0

    # --- what is in order

    def _let_wait(self, stream: Any, other: Any) -> None:
        self._num_events += 1
        event = self._events[self._num_events % NUM_EVENTS]
        self._cuda.eventRecord(event, other.ptr)
        self._cuda.streamWaitEvent(stream.ptr, event)
        self.counts["waits"] += 1

    def _order(self, stream: Any, block: _Block, *, writes: bool) -> None:
        """Let a stream wait for those that its access of a block has to come after."""
        for other in [one for one, wrote in block.uses.items() if (writes or wrote) and one is not stream]:
            self._let_wait(stream, other)
            if stream is block.home:
                del block.uses[other]
        if stream is not block.home:
            self._let_wait(stream, block.home)
            block.uses[stream] = block.uses.get(stream, False) or writes

    def _new(self, stream: Any, size_bytes: int) -> _Block | None:
        address = self._allocate(stream.ptr, size_bytes, 0)
        self.counts["allocations" if address else "refused"] += 1
        if not address:
            return None
        self._cuda.memsetAsync(address, 0, size_bytes, stream.ptr)
        return _Block(address, size_bytes, stream)

    def _write(self, block: _Block, stream: Any) -> None:
        self._order(stream, block, writes=True)
        self._cuda.memsetAsync(block.address, 1, block.size_bytes, stream.ptr)
        self.counts["uses"] += 1

    def _copy(self, source: _Block, target: _Block, stream: Any) -> None:
        self._order(stream, source, writes=False)
        self._order(stream, target, writes=True)
        size_bytes = min(source.size_bytes, target.size_bytes)
        self._cuda.memcpyAsync(target.address, source.address, size_bytes, self._cuda.memcpyDeviceToDevice, stream.ptr)
        self.counts["copies"] += 1

    def _give_back(self, block: _Block, how: int) -> None:
        if how == WAITED:
            self._order(block.home, block, writes=True)
        for stream in block.uses:
            if how == SHARED:
                self.state.share(block.address, stream.ptr)
                self.counts["shares"] += 1
            else:
                self._cuda.streamSynchronize(stream.ptr)
        self._free(0, block.address, 0)
        self.counts["frees"] += 1

    # --- steps

    def _recipe(self) -> list[tuple[int, int, int, int, int]]:
        """A step: what, slot, other slot, stream, bytes or how it is freed."""
        rng, live, steps = self.rng, [], []
        sizes = [int(math.exp(rng.uniform(math.log(600), math.log(LARGEST)))) for _ in range(rng.randint(2, 12))]
        used = rng.sample(range(NUM_STREAMS), rng.randint(1, NUM_STREAMS))
        for slot in range(rng.randint(15, 70)):
            live.append(slot)
            steps.append((NEW, slot, _SLOT_OF_NONE, rng.choice(used), rng.choice(sizes)))
            uses = range(rng.randint(0, 2))
            steps += [(USE, rng.choice(live), _SLOT_OF_NONE, rng.choice(used), 0) for _ in uses]
            if len(live) > 1 and rng.random() < 0.3:
                steps.append((COPY, *rng.sample(live, 2), rng.choice(used), 0))
            while len(live) > rng.randint(4, 24):
                gone = live.pop(rng.randrange(len(live)))
                steps.append((FREE, gone, _SLOT_OF_NONE, 0, rng.choice((SHARED, SHARED, WAITED, SYNCHRONIZED))))
        ending = [slot for slot in live if rng.random() < 0.95]  # the others live until the next step
        return steps + [(FREE, slot, _SLOT_OF_NONE, 0, rng.choice((SHARED, WAITED))) for slot in ending]

    def _do(self, what: int, slot: int, other: int, stream: int, detail: int) -> None:
        block = self._blocks.get(slot)
        if what == NEW:
            if block is not None:
                self._give_back(self._blocks.pop(slot), SHARED)
            made = self._new(self._streams[stream], detail)
            if made is not None:
                self._blocks[slot] = made
        elif block is not None:
            if what == USE:
                self._write(block, self._streams[stream])
            elif what == FREE:
                self._give_back(self._blocks.pop(slot), detail)
            elif other in self._blocks:
                self._copy(block, self._blocks[other], self._streams[stream])

    def _step(self, recipe: list[tuple[int, int, int, int, int]], *, is_marked: bool, is_exact: bool) -> None:
        rng = self.rng
        for action in recipe:
            if not is_exact and rng.random() < 0.002:
                continue  # the step differs
            if not is_exact and rng.random() < 0.002:
                self._do(NEW, rng.randrange(1000, 1020), _SLOT_OF_NONE, rng.randrange(NUM_STREAMS), LARGEST // 3)
            if rng.random() < 0.004:
                what = rng.randrange(5)
                if what < 2:
                    self._make_graph(is_told=what == 0)
                else:
                    (self._query, self._empty_cache, self._new_stream)[what - 2]()
            self._do(*action)
        if self._graphs and rng.random() < 0.3:
            self._launch(rng.choice(self._graphs))
        if is_marked:
            self.controller.mark(MARK_STEP, "")

    # --- what happens meanwhile

    def _query(self) -> None:
        for _ in range(4):
            self._cuda.eventQuery(self.rng.choice(self._events))
        self.counts["queries"] += 1

    def _empty_cache(self) -> None:
        self.controller.memory.release_unused()
        self.counts["empty_cache"] += 1

    def _new_stream(self) -> None:
        """Another stream takes the place of one, whose work is over and on which nothing lives; the first one stays."""
        at = self.rng.randrange(1, NUM_STREAMS)
        old = self._streams[at]
        while self._graphs:
            self._drop(self._graphs[0])
        for slot in [slot for slot, one in self._blocks.items() if one.home is old or old in one.uses]:
            self._give_back(self._blocks.pop(slot), SYNCHRONIZED)
        old.synchronize()
        self._streams[at] = self._make_stream(non_blocking=True)
        self.counts["streams"] += 1

    def _make_graph(self, *, is_told: bool) -> None:
        rng, captures = self.rng, self.controller.captures
        if len(self._graphs) == MOST_GRAPHS:
            self._drop(rng.choice(self._graphs))
        if rng.random() < 0.5:
            self._empty_cache()
        # what an untold capture frees serves only the next one of its stream: with new streams the device would fill
        stream = rng.choice(self._streams) if is_told else self._streams[0]
        forked = rng.choice([one for one in self._streams if one is not stream])
        self._num_captures += 1
        pool = (self._num_captures, 0) if is_told else None
        if pool is not None:
            captures.begin(pool)
        try:
            self._cuda.streamBeginCapture(stream.ptr, rng.randrange(3))
            blocks = self._captured(stream, forked, is_told=is_told)
            graph = self._cuda.streamEndCapture(stream.ptr)
        finally:
            if pool is not None:
                captures.end()
        made = _Graph(self._cuda.graphInstantiate(graph), stream, pool, blocks)
        self._cuda.graphDestroy(graph)
        self._graphs.append(made)
        self.counts["captures" if is_told else "captures untold"] += 1
        self._launch(made)

    def _captured(self, stream: Any, forked: Any, *, is_told: bool) -> list[_Block]:
        """What the graph does; the blocks that live on. A capture that nobody is told of keeps all that it asks for."""
        rng, blocks = self.rng, []
        for _ in range(rng.randint(1, 20)):
            chance = rng.random()
            if chance < 0.5:
                made = self._new(stream, int(math.exp(rng.uniform(math.log(600), math.log(LARGEST)))))
                if made is not None:
                    blocks.append(made)
            elif chance < 0.6 and is_told and blocks:
                self._give_back(blocks.pop(rng.randrange(len(blocks))), SHARED)
            elif chance < 0.8 and self._blocks:
                self._give_back(self._blocks.pop(rng.choice(list(self._blocks))), SHARED)
            elif blocks:
                self._let_wait(forked, stream)
                self._cuda.memsetAsync(blocks[-1].address, 1, blocks[-1].size_bytes, forked.ptr)
                self._let_wait(stream, forked)
        return blocks

    def _launch(self, graph: _Graph) -> None:
        stream = self.rng.choice(self._streams)
        if stream is not graph.stream:
            self._let_wait(stream, graph.stream)
        self._cuda.graphLaunch(graph.handle, stream.ptr)
        if stream is not graph.stream:
            self._let_wait(graph.stream, stream)
        self.counts["launches"] += 1

    def _drop(self, graph: _Graph) -> None:
        self._graphs.remove(graph)
        self._cuda.graphExecDestroy(graph.handle)
        for block in graph.blocks:
            self._give_back(block, SHARED)
        if graph.pool is not None:
            self.controller.captures.release(graph.pool)

    # --- from the begin to the end

    def run(self, operations: int) -> Result:
        began = time.perf_counter()
        while self.num_operations < operations:
            recipe, is_marked = self._recipe(), self.rng.random() < 0.7
            is_exact = self.rng.random() < 0.2
            if is_exact:  # a plan of one kind of step hands memory from stream to stream
                self.controller.drop_plan()
                self.controller.watch_anew()
            for _ in range(_STEPS_OF_A_RECIPE):
                self._step(recipe, is_marked=is_marked or is_exact, is_exact=is_exact)
                self.counts["planned steps"] += self.controller.status.phase is Phase.PLANNED
        while self._graphs:
            self._drop(self._graphs[0])
        for block in self._blocks.values():
            self._give_back(block, SHARED)
        self._blocks.clear()
        self._cuda.deviceSynchronize()
        self.controller.memory.wait_for_deferred()
        problems = [f"{one.text} ({one.num_seen} times)" for one in self.checker.found()[:_MAX_FOUND]]
        names = "total.num_live", "hot.num_deferred", "statistics.num_unknown_frees", "hot.private_kind"
        problems += [f"{said} at the end" for said in not_zero(self.state.record, *names)]
        counts = {**self.counts, "stalloc's waits": self.state.record.driver.num_waits}
        counts["plans"] = self.controller.status.num_plans
        return Result(self.num_operations, self.seed, time.perf_counter() - began, counts, problems)

    @property
    def num_operations(self) -> int:
        names = "allocations", "frees", "uses", "copies", "waits", "launches"
        return sum(self.counts[name] for name in names)


def soak_in_order(operations: int, seed: int) -> dict[str, Any]:
    return asdict(OrderSoak(seed).run(operations))
