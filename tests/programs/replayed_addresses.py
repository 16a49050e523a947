"""Graphs captured in one pool are replayed in random order, with eager work between: is what each reads what it wrote?

The simulator knows addresses and sizes only: each cell of memory remembers who wrote it last, and each read says whose
value it has to find. `captured` captures random graphs under whatever allocator serves torch, and `wrong_reads`
simulates their replays. `lent_replays` lets requests of other work between them borrow the graphs' memory.
"""

import bisect
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_CELL, _PAGE = 512, 2 << 20
_BY_EAGER = -1


@dataclass
class Work:
    """What a graph does at each replay, in order: whether it writes, address, bytes, and the value's name."""

    steps: list[tuple[bool, int, int, int]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # tensors that the program holds on to
    graph: Any = None


class Names:
    """A new name for each value."""

    def __init__(self) -> None:
        self.count = 0

    def new(self) -> int:
        """The next one."""
        self.count += 1
        return self.count


def captured(torch: Any, orders: list[int], seed: int, *, shares_pool: bool = True) -> tuple[list[Work], list[Any]]:
    """Capture a graph for each batch size in `orders`; the graphs and the static inputs, each with its name."""
    draw, names = random.Random(seed), Names()
    inputs = [(torch.empty(n << 10, dtype=torch.uint8, device="cuda"), names.new()) for n in (64, 700, 3000)]
    works: list[Work] = []
    pool = None
    for size in orders:
        work = Work(graph=torch.cuda.CUDAGraph())
        run_step(torch, Work(), inputs, names, size, random.Random(seed + size))  # the warm-up, which is not captured
        with torch.cuda.graph(work.graph, pool=pool if shares_pool else None):
            if not works:  # what a library makes at its first use
                run_step(torch, work, inputs, names, 3, draw)
                work.kept.append(torch.empty(draw.randrange(1, 9) << 20, dtype=torch.uint8, device="cuda"))
            output = run_step(torch, work, inputs, names, size, random.Random(seed + size))
        pool = work.graph.pool()
        if draw.random() < 0.3:
            work.kept.append(output)
        works.append(work)
        del output
    return works, inputs


def run_step(torch: Any, work: Work, inputs: list[Any], names: Names, size: int, draw: random.Random) -> Any:
    """Random requests whose bytes grow with `size`, each of which reads what some before have left."""
    live: list[tuple[Any, int]] = []
    tensor = None
    for _ in range(24):
        for source, name in [*draw.sample(live, min(2, len(live))), draw.choice(inputs)]:
            work.steps.append((False, source.data_ptr(), source.numel(), name))
        num_bytes = size * draw.choice((300, 4096, 30_000, 50_000, 131_072))
        tensor, name = torch.empty(num_bytes, dtype=torch.uint8, device="cuda"), names.new()
        work.steps.append((True, tensor.data_ptr(), num_bytes, name))
        live.append((tensor, name))
        while len(live) > draw.randrange(1, 7):
            del live[draw.randrange(len(live))]
    work.steps += [(False, one.data_ptr(), one.numel(), name) for one, name in live]
    return tensor


def random_replays(torch: Any, works: list[Work], count: int, seed: int) -> list[Any]:
    """Replay in random order, with eager requests between, which live over some replays: the history."""
    draw, history, live = random.Random(seed), [], []
    for _ in range(count):
        which = draw.randrange(len(works))
        works[which].graph.replay()
        history.append(("replay", which))
        if draw.random() < 0.2:
            made = torch.empty(draw.choice((2000, 90_000, 1 << 20, 5 << 20)), dtype=torch.uint8, device="cuda")
            live.append(made)
            history.append(("made", made.data_ptr(), made.numel()))
        while len(live) > draw.randrange(1, 12):
            gone = live.pop(draw.randrange(len(live)))
            history.append(("gone", gone.data_ptr(), gone.numel()))
            del gone
    return history


def lent_replays(torch: Any, stalloc: Any, works: list[Work], count: int, seed: int) -> tuple[list[Any], int]:
    """Replay in random order, with work between that borrows: the history, and how often it got a graph's memory."""
    draw, history, num_lent = random.Random(seed), [], 0
    written = [(at, at + n) for work in works for writes, at, n, _ in work.steps if writes]
    own = range(min(begin for begin, _ in written), max(end for _, end in written))
    for _ in range(count):
        which = draw.randrange(len(works))
        works[which].graph.replay()
        history.append(("replay", which))
        live: list[Any] = []
        with stalloc.borrow_graph_memory():
            for _ in range(draw.randrange(4)):
                made = torch.empty(draw.choice((300, 2000, 90_000, 1 << 20, 5 << 20)), dtype=torch.uint8, device="cuda")
                num_lent += made.data_ptr() in own
                history.append(("made", made.data_ptr(), made.numel()))
                live.append(made)
                del made
                while len(live) > draw.randrange(1, 4):
                    history.append(_gone(live.pop(draw.randrange(len(live)))))
        history += [_gone(one) for one in live]
        live.clear()
        history.append(("kept",))
    return history, num_lent


def _gone(tensor: Any) -> tuple[str, int, int]:
    return "gone", tensor.data_ptr(), tensor.numel()


class _Cells:
    """Who wrote each cell last, of the pages that anybody touches; neighbouring pages stay neighbours."""

    def __init__(self, touched: list[tuple[int, int]]) -> None:
        self._pages = sorted({p for at, n in touched for p in range(at // _PAGE, (at + n - 1) // _PAGE + 1)})
        self.names = np.zeros(len(self._pages) * (_PAGE // _CELL), np.int64)

    def place(self, address: int, num_bytes: int) -> slice:
        """The cells of a tensor."""
        begin = bisect.bisect_left(self._pages, address // _PAGE) * (_PAGE // _CELL) + address % _PAGE // _CELL
        return slice(begin, begin + -(-num_bytes // _CELL))


def wrong_reads(works: list[Work], inputs: list[Any], history: list[Any]) -> tuple[int, int]:
    """How many reads there were, and how many found another's value."""
    given = [(one.data_ptr(), one.numel(), name) for one, name in inputs]
    touched = [(at, n) for work in works for _, at, n, _ in work.steps] + [(at, n) for at, n, _ in given]
    cells = _Cells(touched + [(entry[1], entry[2]) for entry in history if entry[0] in ("made", "gone")])
    plans = [[(writes, cells.place(at, n), name) for writes, at, n, name in work.steps] for work in works]
    for at, n, name in given:
        cells.names[cells.place(at, n)] = name
    reads = wrong = 0
    eager: dict[int, int] = {}
    # what the program holds on to of graphs that were replayed, as long as none that was captured before is
    outputs: dict[int, list[tuple[slice, int]]] = {}
    for number, entry in enumerate(history):
        if entry[0] == "made":
            eager[entry[1]] = _BY_EAGER - number
            cells.names[cells.place(*entry[1:])] = eager[entry[1]]
        elif entry[0] == "gone":
            reads += 1
            wrong += bool((cells.names[cells.place(*entry[1:])] != eager.pop(entry[1])).any())
        elif entry[0] == "kept":
            for place, name in (one for kept in outputs.values() for one in kept):
                reads += 1
                wrong += bool((cells.names[place] != name).any())
        else:
            names = {(at, n): name for writes, at, n, name in works[entry[1]].steps if writes}
            kept = [(one.data_ptr(), one.numel()) for one in works[entry[1]].kept]
            outputs = {which: places for which, places in outputs.items() if which < entry[1]}
            outputs[entry[1]] = [(cells.place(at, n), names[at, n]) for at, n in kept if (at, n) in names]
            for writes, place, name in plans[entry[1]]:
                if writes:
                    cells.names[place] = name
                else:
                    reads += 1
                    wrong += bool((cells.names[place] != name).any())
    return reads, wrong


def clobbered(works: list[Work]) -> int:
    """How many tensors that the program holds on to are written to by a graph that was captured after."""
    found = 0
    for number, work in enumerate(works):
        for kept in work.kept:
            begin, end = kept.data_ptr(), kept.data_ptr() + kept.numel()
            later = [step for one in works[number + 1 :] for step in one.steps if step[0]]
            found += any(at < end and begin < at + n for _, at, n, _ in later)
    return found
