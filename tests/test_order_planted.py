"""Fifteen faults of an allocator, each planted in stalloc, are found by the checker of the order of work."""

import json
import os
from pathlib import Path

import pytest
from properties import variants
from warm_programs import run_file

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAM = Path(__file__).parent / "programs" / "planted_faults.py"
#: the program that a fault shows in, and how what is found begins to say so
FAULTS = {
    "unmaps_without_waiting": ("pages", "cuMemUnmap takes"),
    "unmaps_too_much": ("pages", "of which a part is not mapped"),
    "maps_over_a_mapping": ("pages", "where something is mapped already"),
    "frees_addresses_that_have_memory": ("pages", "of which a part is still mapped"),
    "maps_without_access": ("pages", "but no device was given access to it (cuMemSetAccess)"),
    "sleeps_without_waiting": ("asleep", "cuMemUnmap takes"),
    "moves_without_waiting": ("moved", "may still write it on stream"),
    "gives_a_page_out_twice": ("streams", "while"),
    "hands_over_without_waiting": ("streams", "the memory was freed and given to another tensor in between"),
    "takes_every_event_for_done": ("streams", "the memory was freed and given to another tensor in between"),
    "records_on_the_wrong_stream": ("streams", "the memory was freed and given to another tensor in between"),
    "does_not_hear_of_captures": ("graph", "calls cuEventQuery while a graph is captured"),
    "maps_in_a_capture_without_leave": ("graph", "while a graph is captured, which its capture forbids"),
    "computes_before_weights_arrive": ("layers", "may still write it on stream"),
    "copies_before_weights_are_done": ("layers", "may still read it on the default stream"),
}
#: one in each program
ALWAYS = (
    "unmaps_without_waiting",
    "hands_over_without_waiting",
    "does_not_hear_of_captures",
    "computes_before_weights_arrive",
)


def found(program: str, *faults: str) -> list[str]:
    """The sentences of what is found in a program, under stalloc with faults."""
    variables = {**os.environ, "STALLOC_VIRTUAL_ORDER": "strict", "STALLOC_CACHE": "off"}
    done = run_file(PROGRAM, program, *faults, variables=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@variants("program", sorted({program for program, _ in FAULTS.values()}))
def test_nothing_is_found_without_a_fault(program: str) -> None:
    assert found(program) == []


@variants("fault", [*ALWAYS, *(one for one in FAULTS if one not in ALWAYS)], always=len(ALWAYS))
def test_a_planted_fault_is_found(fault: str) -> None:
    program, says = FAULTS[fault]
    texts = found(program, fault)
    assert any(says in text for text in texts), texts
