"""Recorded traces and published instances: planned, valid, and as low as is known to be possible."""

import csv
import gzip
import re

import numpy as np
import pytest
from recordings import OUR_OTHERS, SNAPSHOTS, STRANGERS_SNAPSHOTS, each, path_of, shared_folder

from stalloc.lifespans import peak_load
from stalloc.planner import Plan, plan, plan_arrays, validate
from stalloc.trace import load_traces

INSTANCES = (
    "iopddl_G_1.csv",
    pytest.param("iopddl_S_1.csv.gz", marks=pytest.mark.slow),
    pytest.param("iopddl_Y_1.csv.gz", marks=pytest.mark.slow),
    "pangu_2.6B.csv.gz",
    "resnet50.csv",
)


def stated_loads() -> dict[tuple[str, int], int]:
    """The `max live 512` of every snapshot that the README of strangers' traces lists, by file and device."""
    loads = {}
    folder = shared_folder("traces")
    for line in (folder / "README.md").read_text().splitlines() if folder else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if match := re.fullmatch(r"`(\S+\.pickle\.gz)`(?: dev(\d+))?", cells[0]):
            loads[match[1], int(match[2] or 0)] = int(cells[5])
    return loads


@pytest.mark.usefixtures("shared_traces")
def test_the_load_of_every_snapshot_is_stated():
    assert {file for file, _ in stated_loads()} == set(STRANGERS_SNAPSHOTS)


@pytest.mark.parametrize("name", each((*SNAPSHOTS, *OUR_OTHERS)))
def test_every_recording_is_planned_at_its_maximum_load(name):
    stated = {device: load for (file, device), load in stated_loads().items() if file == name}
    for trace in load_traces(path_of(name)):
        load = peak_load(trace.start, trace.end, trace.aligned_size(512))
        assert stated.pop(trace.device, load) == load
        made = plan(trace)
        assert validate(made, trace).ok
        assert made.num_planned == trace.num_requests
        assert made.lower_bound_bytes == load
        assert made.peak_bytes == made.lower_bound_bytes
    assert not stated


@pytest.mark.parametrize("name", INSTANCES)
def test_published_instances_are_planned_at_their_maximum_load(shared_instances, name):
    path = shared_instances / name
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = [(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]
    start, end, size = np.array(rows, np.int64).T
    layout = plan_arrays(start, end, size, alignment=1)
    made = Plan(
        offset=layout.offset,
        size=size,
        start=start,
        end=end,
        stream=np.zeros_like(size),
        device=0,
        alignment=1,
        peak_bytes=layout.peak_bytes,
        lower_bound_bytes=layout.lower_bound_bytes,
        optimal=False,
        method=layout.method,
        kind="trace",
        provenance={},
    )
    assert validate(made).detail == ""
    assert layout.peak_bytes == layout.lower_bound_bytes
