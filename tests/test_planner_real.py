"""Recorded traces and published instances: planned, valid, and as low as is known to be possible."""

import csv
import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from recordings import SNAPSHOTS, each

from stalloc.planner import Plan, plan, plan_arrays, validate
from stalloc.trace import load_traces

INSTANCES = (
    "iopddl_G_1.csv",
    pytest.param("iopddl_S_1.csv.gz", marks=pytest.mark.slow),
    pytest.param("iopddl_Y_1.csv.gz", marks=pytest.mark.slow),
    pytest.param("pangu_2.6B.csv.gz", marks=pytest.mark.slow),
    "resnet50.csv",
)


def stated_loads(readme: Path) -> dict[tuple[str, int], int]:
    """The `max live 512` of every snapshot that the README of the traces lists, by file and device."""
    loads = {}
    for line in readme.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if match := re.fullmatch(r"`(\S+\.pickle\.gz)`(?: dev(\d+))?", cells[0]):
            loads[match[1], int(match[2] or 0)] = int(cells[5])
    return loads


def test_the_load_of_every_snapshot_is_stated(shared_traces):
    assert {file for file, _ in stated_loads(shared_traces / "README.md")} == set(SNAPSHOTS)


@pytest.mark.parametrize("name", each(SNAPSHOTS))
def test_every_snapshot_is_planned_at_its_maximum_load(shared_traces, name):
    loads = {device: load for (file, device), load in stated_loads(shared_traces / "README.md").items() if file == name}
    for trace in load_traces(shared_traces / name):
        made = plan(trace)
        assert validate(made, trace).ok
        assert made.num_planned == trace.num_requests
        assert made.lower_bound_bytes == loads.pop(trace.device)
        assert made.peak_bytes == made.lower_bound_bytes
    assert not loads


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
