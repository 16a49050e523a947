"""Where a program goes on on its tape, and where it only seems to: copies of weights that look like an optimizer's."""

import numpy as np
from programs.core_machine import Machine, Ring

NUM_ACTIVATIONS, NUM_WEIGHTS = 80, 24


def training() -> tuple[Machine, Ring]:
    """A step of activations, one after the other, and then temporary memory for each weight, all at once."""
    rng = np.random.default_rng(1)
    ring = Ring(rng, NUM_ACTIVATIONS + NUM_WEIGHTS)
    ring.size = (rng.permutation(ring.length) + 1) * 64 * 1024
    ring.stream = np.zeros(ring.length, np.int64)
    weights = ring.size[NUM_ACTIVATIONS:]
    ring.offset = np.zeros(ring.length, np.int64)
    ring.offset[NUM_ACTIVATIONS:] = np.cumsum([0, *weights[:-1]])
    ring.peak = int(weights.sum())
    assert ring.size.max() <= ring.peak
    machine = Machine()
    machine.install(ring)
    return machine, ring


def one_step(machine: Machine, ring: Ring) -> int:
    """One pass over the ring; how many of its requests the plan served."""
    hits = machine.state.record.hits
    for size in ring.size[:NUM_ACTIVATIONS].tolist():
        machine.free(machine.allocate(size))
    for address in [machine.allocate(size) for size in ring.size[NUM_ACTIVATIONS:].tolist()]:
        machine.free(address)
    return machine.state.record.hits - hits


def copies(machine: Machine, ring: Ring) -> list[int]:
    """Memory for a copy of each weight."""
    return [machine.allocate(size) for size in ring.size[NUM_ACTIVATIONS:].tolist()]


def test_copies_that_are_kept_do_not_take_the_places_of_an_optimizers_memory_again_and_again() -> None:
    machine, ring = training()
    kept: list[int] = []
    for step in range(60):
        if step % 8 == 4:
            for address in kept:
                machine.free(address)
            kept = copies(machine, ring)
        served = one_step(machine, ring)
        assert step < 20 or served == ring.length, f"step {step}: copies stand in the way of {ring.length - served}"
    for address in kept:
        machine.free(address)
    machine.check_counts()


def test_a_step_that_leaves_most_out_is_found_where_it_goes_on() -> None:
    """Nothing that it served on the way lives when it begins anew, so it is believed each time."""
    machine, ring = training()
    for step in range(20):
        hits = machine.state.record.hits
        if step % 3 == 2:
            for address in copies(machine, ring):
                machine.free(address)
            assert machine.state.record.hits - hits >= NUM_WEIGHTS // 2
        else:
            assert one_step(machine, ring) >= ring.length - 2
