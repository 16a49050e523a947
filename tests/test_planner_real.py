"""Recorded traces and published instances: planned, valid, and as low as is known to be possible."""

import csv
import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from stalloc.planner import Plan, plan, plan_arrays, validate
from stalloc.trace import load_traces

#: peak over the maximum load that is reached, sizes as in the files
INSTANCES = {
    "A.1048576.csv": 1.07,
    "B.1048576.csv": 1.07,
    "C.1048576.csv": 1.07,
    "D.1048576.csv": 1.10,
    "E.1048576.csv": 1.07,
    "F.1048576.csv": 1.07,
    "G.1048576.csv": 1.07,
    "H.1048576.csv": 1.04,
    "I.1048576.csv": 1.10,
    "J.1048576.csv": 1.08,
    "K.1048576.csv": 1.14,
    "iopddl_G_1.csv": 1.0,
    "iopddl_S_1.csv.gz": 1.0,
    "iopddl_Y_1.csv.gz": 1.0,
    "pangu_2.6B.csv.gz": 1.0,
    "resnet50.csv": 1.0,
}


def stated_loads(readme: Path) -> dict[tuple[str, int], int]:
    """The `max live 512` of every snapshot that the README of the traces lists, by file and device."""
    loads = {}
    for line in readme.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if match := re.fullmatch(r"`(\S+\.pickle\.gz)`(?: dev(\d+))?", cells[0]):
            loads[match[1], int(match[2] or 0)] = int(cells[5])
    return loads


def test_every_snapshot_is_planned_at_its_maximum_load(shared_traces):
    loads = stated_loads(shared_traces / "README.md")
    files = sorted({file for file, _ in loads})
    assert len(files) > 10
    for file in files:
        for trace in load_traces(shared_traces / file):
            made = plan(trace)
            assert validate(made, trace).ok, file
            assert made.num_planned == trace.num_requests
            assert made.lower_bound_bytes == loads.pop((file, trace.device)), file
            assert made.peak_bytes == made.lower_bound_bytes, file
    assert not loads


@pytest.mark.parametrize("name", INSTANCES)
def test_published_instances_keep_their_peaks(shared_instances, name):
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
    assert layout.peak_bytes <= INSTANCES[name] * layout.lower_bound_bytes
