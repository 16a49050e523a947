"""Classes, phases and the lifespan graph of programs whose answer is known by construction."""

import random

import numpy as np
import pytest
from made_up_programs import MIB, Program

from stalloc.lifespans import LifespanClass, Regularity, classify, cut_events, find_phases, fold, lifespan_graph
from stalloc.trace import MARK_PHASE_BEGIN, MARK_PHASE_END, Trace

WEIGHT, ACTIVATION, SCRATCH, ODD = 7 * MIB, 3 * MIB, MIB, 11 * MIB


def training(num_steps, *, marks=False, odd_step=None) -> Trace:
    program = Program()
    for layer in range(4):
        program.alloc(f"weight{layer}", WEIGHT)
    for step in range(num_steps):
        if marks:
            program.mark()
            program.mark("forward", MARK_PHASE_BEGIN)
        for layer in range(20):
            program.alloc(f"activation{layer}", ACTIVATION)
            program.alloc("scratch", SCRATCH)
            program.free("scratch")
        if step == odd_step:
            program.alloc("odd", ODD)
            program.free("odd")
        if marks:
            program.mark("forward", MARK_PHASE_END)
            program.mark("backward", MARK_PHASE_BEGIN)
        for layer in reversed(range(20)):
            program.alloc("scratch", SCRATCH)
            program.free("scratch")
            program.free(f"activation{layer}")
        if marks:
            program.mark("backward", MARK_PHASE_END)
    return program.trace()


@pytest.mark.parametrize("marks", [False, True])
def test_weights_are_persistent_activations_scoped_scratch_transient(marks):
    trace = training(5, marks=marks)
    classes = classify(trace, fold(trace))
    assert set(classes.lifespan[trace.size == WEIGHT]) == {LifespanClass.PERSISTENT}
    assert set(classes.lifespan[trace.size == SCRATCH]) == {LifespanClass.TRANSIENT}
    scoped = classes.lifespan[trace.size == ACTIVATION] == LifespanClass.SCOPED
    # the last activation lives for a moment only, on both sides of the peak
    assert scoped.mean() >= (1 if marks else 0.95)


def test_totals_count_every_request_once():
    trace = training(5)
    totals = classify(trace, fold(trace)).totals(trace.size)
    for names in (("persistent", "scoped", "transient"), ("unknown", "static", "dynamic")):
        assert sum(totals[name].requests for name in names) == trace.num_requests
        assert sum(totals[name].bytes for name in names) == trace.size.sum()


def test_what_repeats_is_static_and_what_comes_once_is_dynamic():
    trace = training(8, odd_step=6)
    classes = classify(trace, fold(trace))
    assert set(classes.regularity[trace.size == ODD]) == {Regularity.DYNAMIC}
    assert set(classes.regularity[trace.size == WEIGHT]) == {Regularity.UNKNOWN}
    activations = np.flatnonzero(trace.size == ACTIVATION)
    assert set(classes.regularity[activations[40:80]]) == {Regularity.STATIC}


def test_without_steps_nothing_is_called_static_or_dynamic():
    trace = training(1)
    classes = classify(trace)
    assert set(classes.regularity) == {Regularity.UNKNOWN}
    assert set(classes.lifespan[trace.size == WEIGHT]) == {LifespanClass.PERSISTENT}


def test_a_training_step_is_a_rise_and_a_fall():
    phases = find_phases(training(3))
    assert phases.name == ("rise", "fall") * 3


def test_marks_name_the_phases():
    trace = training(2, marks=True)
    phases = find_phases(trace)
    assert [name for name in phases.name if name] == ["forward", "backward"] * 2
    assert phases.of(np.array([-1]))[0] == -1


def random_trace(seed: int) -> Trace:
    print("seed", seed)
    chance = random.Random(seed)
    program = Program()
    for _ in range(120):
        if program.names and chance.random() < 0.5:
            program.free(chance.choice(sorted(program.names)))
        else:
            program.alloc(f"n{chance.randrange(10**6)}", chance.randrange(1, 6) * 1000)
    return program.trace()


@pytest.mark.parametrize("seed", range(10))
def test_groups_are_connected_exactly_if_members_are_live_together(seed):
    trace = random_trace(seed)
    graph = lifespan_graph(trace, classify(trace))
    assert sum(graph.nodes[node]["requests"] for node in graph) == trace.num_requests
    rows = {node: graph.nodes[node]["rows"] for node in graph}
    for one in graph:
        for other in graph:
            meets = any(
                trace.start[a] < trace.end[b] and trace.start[b] < trace.end[a] for a in rows[one] for b in rows[other]
            )
            if one != other:
                assert graph.has_edge(one, other) == meets
    for node in graph:
        mine = rows[node]
        most = max(
            int(sum(trace.size[r] for r in mine if trace.start[r] <= at < trace.end[r])) for at in trace.start[mine]
        )
        assert graph.nodes[node]["peak_bytes"] == most
        assert graph.nodes[node]["bytes"] == trace.size[mine].sum()


def test_many_groups_are_merged_by_size():
    program = Program()
    for i in range(3000):
        program.alloc(f"n{i}", 1000 + i)
    trace = program.trace()
    graph = lifespan_graph(trace, classify(trace))
    assert len(graph) <= 4
    assert sum(graph.nodes[node]["requests"] for node in graph) == 3000


def test_cuts_lie_between_steps_where_only_weights_are_live():
    trace = training(4)
    classes = classify(trace, fold(trace))
    cuts = cut_events(trace, classes)
    assert len(cuts) >= 4
    for cut in cuts:
        live = (trace.start < cut) & (trace.end >= cut) & (classes.lifespan != LifespanClass.PERSISTENT)
        assert trace.size[live].sum() <= 0.02 * 20 * ACTIVATION
