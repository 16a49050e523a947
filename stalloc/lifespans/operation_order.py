"""Another order of a step's operations that needs less memory, as ROAM looks for, replayed on the record.

Source: Shu et al., "ROAM: memory-efficient large DNN training via optimized operator ordering and memory layout", 2023.
Contract: the order keeps every dependency of the graph of operations, and that of operations that draw random numbers.
A request lives from the operation that made it until all that use it are done; one that no operation is seen to use,
until the program let go of it. An operation is moved only where that lowers what lives between its old place and its
new one, so the peak is never above that of the program's order.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stalloc.columns import Column, Rows, Sizes, Times
from stalloc.lifespans.steady_step import SteadyStep
from stalloc.trace import Trace
from stalloc.trace.operations import ACCESS_WRITTEN, Operations

if TYPE_CHECKING:
    import networkx as nx

_RANDOM = ("dropout", "rand", "bernoulli", "normal_", "uniform_", "exponential_", "multinomial", "attention")


def operation_graph(trace: Trace, operations: Operations, rows: Rows) -> "nx.DiGraph":
    """The graph of some operations, given in their order, such as those of a steady step.

    Nodes are rows with attributes `name` and `made` (rows of the requests that the operation made).
    """
    import networkx as nx  # takes long, and whoever only asks for operations does without

    graph = nx.DiGraph()
    made: dict[int, list[int]] = defaultdict(list)
    for request, maker in enumerate(operations.made_by.tolist()):
        made[maker].append(request)
    last: dict[int, int] = {}  # of each request: who made or changed it last
    readers: dict[int, list[int]] = defaultdict(list)  # since then
    bounds = np.searchsorted(operations.access_op, np.stack([rows, rows + 1]))
    for row, low, high in zip(rows.tolist(), *bounds.tolist(), strict=True):
        graph.add_node(row, name=operations.name_of(row), made=made.get(row, []))
        accesses = operations.access_request[low:high].tolist(), operations.access_kind[low:high].tolist()
        for request, kind in zip(*accesses, strict=True):
            if request in last:
                _need(graph, last[request], row, request, int(trace.size[request]))
            if kind == ACCESS_WRITTEN:
                for reader in readers.pop(request, ()):
                    if reader != row and not graph.has_edge(reader, row):
                        graph.add_edge(reader, row, kind="order", requests=[], bytes=0)
                last[request] = row
            else:
                readers[request].append(row)
        for request in made.get(row, ()):
            last[request] = row
    return graph


def _need(graph: "nx.DiGraph", maker: int, user: int, request: int, num_bytes: int) -> None:
    if maker == user:
        return
    if not graph.has_edge(maker, user) or graph.edges[maker, user]["kind"] == "order":
        graph.add_edge(maker, user, kind="value", requests=[], bytes=0)
    edge = graph.edges[maker, user]
    edge["requests"].append(request)
    edge["bytes"] += num_bytes


def random_draws(operations: Operations, rows: Rows) -> list[int]:
    """The rows, of some, that may draw random numbers: what they draw depends on those before them."""
    return [row for row in rows.tolist() if any(part in operations.name_of(row) for part in _RANDOM)]


def crossing_bytes(trace: Trace, graph: "nx.DiGraph") -> Column:
    """(k,) after each operation, in order: bytes of the requests made so far in the graph that a later one needs."""
    place = {row: number for number, row in enumerate(graph)}
    last_use: dict[int, int] = {}
    made_at: dict[int, int] = {}
    for row in graph:
        for request in graph.nodes[row]["made"]:
            made_at[request] = place[row]
    for _, user, told in graph.edges(data=True):
        for request in told["requests"]:
            last_use[request] = max(last_use.get(request, -1), place[user])
    change = np.zeros(len(graph) + 1, np.int64)
    for request, begun in made_at.items():
        if last_use.get(request, -1) > begun:
            change[begun] += trace.size[request]
            change[last_use[request]] -= trace.size[request]
    return np.cumsum(change)[:-1]


def cut_operations(graph: "nx.DiGraph") -> list[int]:
    """Operations after which only what they made themselves, of all made so far in the graph, is needed later.

    There the graph falls into two parts that have one operation in common.
    """
    place = {row: number for number, row in enumerate(graph)}
    furthest, cuts = -1, []
    for row in graph:
        if furthest <= place[row]:
            cuts.append(row)
        furthest = max([furthest, *(place[user] for user in graph.successors(row))])
    return cuts[1:] if cuts and place[cuts[0]] == 0 else cuts


_MOST_ROUNDS = 8


@dataclass(frozen=True, eq=False)
class Reordered:
    """An order and what it needs beside the program's own, bytes allocated within the step."""

    order: Rows  #: rows of the operations
    peak_bytes: int
    program_peak_bytes: int  #: as recorded
    early_peak_bytes: int  #: in the program's order, with each request freed after its last use
    num_moved: int  #: operations whose predecessor is another one now
    lifespans: "Lifespans"  #: in this order
    program_lifespans: "Lifespans"  #: in the program's order, freed after the last use


@dataclass(frozen=True, eq=False)
class Lifespans:
    """When each request lives, on a clock that counts what the operations do; for a planner."""

    start: Times  #: (n,)
    end: Times  #: (n,) > start
    size: Sizes  #: (n,) bytes


def reorder(trace: Trace, operations: Operations, step: SteadyStep) -> Reordered:
    """The order of lowest peak that moving operations one by one finds."""
    users, recorded = _Users(trace, operations, step), _Users(trace, operations, step, until_let_go=True)
    graph = operation_graph(trace, operations, step.operations)
    place = {row: number for number, row in enumerate(step.operations.tolist())}
    after: list[set[int]] = [set() for _ in place]
    for one, other in graph.edges:
        after[place[one]].add(place[other])
    drawn = random_draws(operations, step.operations)
    for one, other in itertools.pairwise(drawn):
        after[place[one]].add(place[other])
    before: list[set[int]] = [set() for _ in place]
    for one, others in enumerate(after):
        for other in others:
            before[other].add(one)

    program = list(range(len(place)))
    best, early = program, users.peak_bytes(program)
    order, lowest = program, early
    for _ in range(_MOST_ROUNDS):
        earlier = _pulled(order, before, after, _Walk(users), lowest)
        order = _pulled(earlier[::-1], after, before, _Walk(users, backward=True), lowest)[::-1]
        peak = min((users.peak_bytes(one), number) for number, one in enumerate((earlier, order)))
        if peak[0] >= lowest:
            break
        best, lowest = (earlier, order)[peak[1]], peak[0]
    moved = sum(two - one != 1 for one, two in itertools.pairwise(best))
    return Reordered(
        step.operations[np.array(best, np.int64)],
        lowest,
        recorded.peak_bytes(program),
        early,
        moved,
        users.lifespans(best),
        users.lifespans(program),
    )


class _Users:
    """Requests of a step, by the places of operations in the program's order."""

    def __init__(self, trace: Trace, operations: Operations, step: SteadyStep, *, until_let_go: bool = False) -> None:
        num = len(step.operations)
        begins = operations.begin[step.operations]
        self.base = 0  #: lives when the step begins
        self.size: list[int] = []
        self.maker: list[int] = []  #: -1: made before the step
        self.users: list[set[int]] = []  #: those it waits for, its maker included; empty: it outlives the step
        self.of: list[list[int]] = [[] for _ in range(num)]  #: requests of each operation
        used = self._accesses(operations, step)
        inner: list[list[tuple[int, int]]] = [[] for _ in range(num)]  # of each operation: events and bytes within it
        self._moments: list[tuple[int, int]] = []  #: event of the begin of each request; of its end, if it is within
        lasting = set(step.beyond.tolist()) | set(step.held.tolist())
        for request in (*step.held.tolist(), *step.ended.tolist(), *step.requests.tolist()):
            is_old = bool(trace.start[request] < step.begin_event)
            maker = -1 if is_old else max(0, int(np.searchsorted(begins, trace.start[request], "right")) - 1)
            last = max(0, int(np.searchsorted(begins, trace.end[request], "left")) - 1)
            size = int(trace.size[request])
            self.base += size * is_old
            seen = used.get(request, set())
            users = set() if request in lasting else seen | ({maker} - {-1})
            if until_let_go or not seen:
                users |= set() if request in lasting else {last}
            begin, end = int(trace.start[request]), -1
            if maker >= 0:
                inner[maker].append((begin, size))
                if users == {maker}:
                    end = int(trace.end[request])
                    inner[maker].append((end, -size))
            self._moments.append((begin, end))
            number = len(self.size)
            self.size.append(size)
            self.maker.append(maker)
            self.users.append(users)
            for place in users | ({maker} - {-1}):
                self.of[place].append(number)
        self._extra = [_highest(events) for events in inner]

    @staticmethod
    def _accesses(operations: Operations, step: SteadyStep) -> dict[int, set[int]]:
        bounds = np.searchsorted(operations.access_op, np.stack([step.operations, step.operations + 1]))
        found: dict[int, set[int]] = defaultdict(set)
        for place, (low, high) in enumerate(bounds.T.tolist()):
            for request in operations.access_request[low:high].tolist():
                found[request].add(place)
        return found

    def peak_bytes(self, order: Iterable[int]) -> int:
        """The most that is allocated in an order."""
        walk = _Walk(self)
        return max((walk.go(place) for place in order), default=self.base)

    def lifespans(self, order: list[int]) -> Lifespans:
        """When each request lives in an order; what is made by one operation begins as it was recorded."""
        at = {place: number for number, place in enumerate(order)}
        events = {place: sorted({one for number in self.of[place] for one in self._moments[number]}) for place in order}
        width = 2 + max(map(len, events.values()), default=0)
        start, end = [], []
        for number, (maker, users) in enumerate(zip(self.maker, self.users, strict=True)):
            begun, ended = self._moments[number]
            start.append(0 if maker < 0 else 1 + width * at[maker] + events[maker].index(begun))
            if ended >= 0:
                end.append(1 + width * at[maker] + events[maker].index(ended))
            else:
                end.append(width * (1 + max(at[one] for one in users)) if users else 1 + width * len(order))
        rows = [row for row, (one, other) in enumerate(zip(start, end, strict=True)) if one < other]
        columns = (np.array(column, np.int64)[rows] for column in (start, end, self.size))
        return Lifespans(*columns)

    def highest_within(self, place: int) -> int:
        """What an operation has at the most of what it makes itself."""
        return self._extra[place]


class _Walk:
    """Going through operations, forward or backward, and what is allocated where it stands."""

    def __init__(self, users: _Users, *, backward: bool = False) -> None:
        self._users, self._backward = users, backward
        self._waits = [len(one) for one in users.users]
        self._load = users.base
        if backward:
            kept = zip(users.size, users.maker, users.users, strict=True)
            self._load += sum(size * ((maker >= 0) - bool(ends)) for size, maker, ends in kept)

    def gain(self, place: int) -> int:
        """By how much less is allocated on the side that an operation is moved away from, if it is negative."""
        users, gain = self._users, 0
        for number in users.of[place]:
            is_first = self._waits[number] == (len(users.users[number]) if self._backward else 1)
            gain += users.size[number] * (users.maker[number] == place)
            gain -= users.size[number] * (place in users.users[number] and is_first)
        return -gain if self._backward else gain

    def peak_at(self, place: int) -> int:
        """The most that is allocated during an operation that is done next."""
        before = self._load + (self.gain(place) if self._backward else 0)
        return before + self._users.highest_within(place)

    def go(self, place: int) -> int:
        """Do an operation; the most that was allocated meanwhile comes back."""
        peak = self.peak_at(place)
        self._load += self.gain(place)
        for number in self._users.of[place]:
            self._waits[number] -= place in self._users.users[number]
        return max(peak, self._load)

    def near(self, place: int) -> set[int]:
        """Operations whose gain may be another one after this one."""
        return {one for number in self._users.of[place] for one in self._users.users[number]}


def _pulled(
    order: list[int], before: list[set[int]], after: list[set[int]], walk: _Walk, limit_bytes: int
) -> list[int]:
    """An order in which whatever lowers the load comes as soon as it can, if it stays within a limit meanwhile."""
    waits = [len(one) for one in before]
    is_done = [False] * len(order)
    found: list[int] = []
    worth: dict[int, int] = {}  # those that can be done and lower the load, with by how much

    def look(places: Iterable[int]) -> None:
        for place in places:
            worth.pop(place, None)
            if not is_done[place] and waits[place] == 0 and (gain := walk.gain(place)) < 0:
                worth[place] = gain

    def do(place: int) -> None:
        near = walk.near(place)
        walk.go(place)
        found.append(place)
        is_done[place] = True
        for one in after[place]:
            waits[one] -= 1
        look(near | after[place] | {place})

    look(range(len(order)))
    for place in order:
        while worth and not is_done[place]:
            best = min(worth, key=lambda one: (worth[one], one))
            if walk.peak_at(best) > limit_bytes:
                del worth[best]  # looked at again when something near it is done
                continue
            do(best)
        if not is_done[place]:
            do(place)
    return found


def _highest(events: list[tuple[int, int]]) -> int:
    sizes = [size for _, size in sorted(events)]
    return max(0, *np.cumsum(sizes).tolist()) if sizes else 0
