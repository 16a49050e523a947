"""Recorded traces and published instances: planned, valid, and as low as is known to be possible."""

import csv
import gzip

import numpy as np
import pytest
from recordings import OUR_OTHERS, SNAPSHOTS, each, path_of

from stalloc.lifespans import peak_load
from stalloc.planner import Plan, plan, plan_arrays, validate
from stalloc.trace import load_traces

INSTANCES = (
    "iopddl_G_1.csv",
    pytest.param("iopddl_S_1.csv.gz", marks=pytest.mark.slow),
    pytest.param("iopddl_Y_1.csv.gz", marks=pytest.mark.slow),
    pytest.param("pangu_2.6B.csv.gz", marks=pytest.mark.slow),
    "resnet50.csv",
)


@pytest.mark.parametrize("name", each((*SNAPSHOTS, *OUR_OTHERS)))
def test_every_recording_is_planned_at_its_maximum_load(name):
    for trace in load_traces(path_of(name)):
        made = plan(trace)
        assert validate(made, trace).ok
        assert made.num_planned == trace.num_requests
        assert made.lower_bound_bytes == peak_load(trace.start, trace.end, trace.aligned_size(512))
        assert made.peak_bytes == made.lower_bound_bytes


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
