"""When the tasks of a step run: each queue works off its own in the order in which they were put there.

Contract: a task begins when its queue is free and all that it waits for has ended, as work on streams of a GPU does
that is ordered by events; nothing else holds it up.
"""

import enum
import heapq
from collections.abc import Sequence
from dataclasses import dataclass


class Queue(enum.Enum):
    """What works off tasks, one after the other."""

    COMPUTE = "compute"
    TO_DEVICE = "copies to the device"
    TO_HOST = "copies to the host"
    DISK = "disk"


@dataclass(frozen=True)
class Task:
    """A piece of work that occupies a queue for some seconds."""

    name: str
    queue: Queue
    seconds: float
    after: tuple[int, ...] = ()  #: earlier tasks, by number, that have to have ended


@dataclass(frozen=True)
class Schedule:
    """When each task runs."""

    begin: tuple[float, ...]
    end: tuple[float, ...]
    busy: dict[Queue, float]  #: seconds that each queue works

    @property
    def seconds(self) -> float:
        """Until the last task has ended."""
        return max(self.end, default=0.0)


def schedule(tasks: Sequence[Task]) -> Schedule:
    """The schedule of tasks in the order in which the program asks for them."""
    free = dict.fromkeys(Queue, 0.0)
    busy = dict.fromkeys(Queue, 0.0)
    begin: list[float] = []
    end: list[float] = []
    for number, task in enumerate(tasks):
        assert all(0 <= one < number for one in task.after), f"task {number} waits for what comes later"
        begin.append(max([free[task.queue], *(end[one] for one in task.after)]))
        end.append(begin[-1] + task.seconds)
        free[task.queue] = end[-1]
        busy[task.queue] += task.seconds
    return Schedule(tuple(begin), tuple(end), busy)


def schedule_as_ready(tasks: Sequence[Task]) -> Schedule:
    """The schedule in which a free queue takes the task that has been ready for longest, whenever it was asked for.

    List scheduling: it keeps what tasks wait for, and is a way to run them, not the quickest that there is.
    """
    waits = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for one in task.after:
            followers[one].append(number)
    ready: dict[Queue, list[tuple[float, int]]] = {queue: [] for queue in Queue}
    for number, task in enumerate(tasks):
        if not task.after:
            ready[task.queue].append((0.0, number))  # in their order, which is that of a heap
    free, busy = set(Queue), dict.fromkeys(Queue, 0.0)
    begin, end = [0.0] * len(tasks), [0.0] * len(tasks)
    running: list[tuple[float, int]] = []
    now = 0.0
    while True:
        for queue in [queue for queue in free if ready[queue]]:
            _, number = heapq.heappop(ready[queue])
            begin[number], end[number] = now, now + tasks[number].seconds
            busy[queue] += tasks[number].seconds
            free.remove(queue)
            heapq.heappush(running, (end[number], number))
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:  # all that ends now, before anything else begins
            _, number = heapq.heappop(running)
            free.add(tasks[number].queue)
            for one in followers[number]:
                waits[one] -= 1
                if not waits[one]:
                    heapq.heappush(ready[tasks[one].queue], (now, one))
    return Schedule(tuple(begin), tuple(end), busy)
