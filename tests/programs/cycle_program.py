"""A program that goes round a made-up cycle, with deviations where a test wants them."""

import numpy as np
from programs.core_machine import MIB, Cycle, Machine

INSERT, DROP, RESIZE, SWAP, LINGER = range(5)


class Program:
    """A program that goes round a cycle, with deviations at given positions of a pass."""

    def __init__(self, machine: Machine, cycle: Cycle, rng: np.random.Generator) -> None:
        self.machine, self.cycle, self.rng = machine, cycle, rng
        self.due: dict[int, list[int]] = {}  # position from the begin -> addresses to free before it
        self.position = 0

    def _request(self, size: int, stream: int, lifespan: int) -> None:
        address = self.machine.allocate(size, stream)
        assert address
        self.due.setdefault(self.position + lifespan, []).append(address)

    def one_pass(self, deviations: dict[int, int] | None = None) -> None:
        """One pass over the cycle; `deviations`: position in the cycle -> what is done differently there."""
        cycle, order = self.cycle, list(range(self.cycle.length))
        for at, what in (deviations or {}).items():
            if what == SWAP and at + 1 < cycle.length:
                order[at], order[at + 1] = order[at + 1], order[at]
        for i in order:
            for address in self.due.pop(self.position, ()):
                self.machine.free(address)
            size, stream, lifespan = int(cycle.size[i]), int(cycle.stream[i]), int(cycle.lifespan[i])
            what = (deviations or {}).get(i)
            if what == INSERT:
                self._request(int(self.rng.integers(513, MIB)), stream, int(self.rng.integers(1, 2 * cycle.length)))
            elif what == RESIZE:
                size += 512 * int(self.rng.integers(1, 100))
            elif what == LINGER:
                lifespan += int(self.rng.integers(1, 2 * cycle.length))
            if what != DROP:
                self._request(size, stream, lifespan)
            self.position += 1

    def end(self) -> None:
        """Free all."""
        for addresses in self.due.values():
            for address in addresses:
                self.machine.free(address)
        self.due.clear()
