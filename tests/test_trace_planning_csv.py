"""Planning CSV: lifespans as they are, ids and offsets kept, mistakes named by line."""

import gzip

import pytest

from stalloc.errors import BadInputError
from stalloc.lifespans import lower_bound, peak_load
from stalloc.trace import load_traces, save_traces


def load(tmp_path, text, name="plan.csv"):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    (trace,) = load_traces(path)
    return trace


@pytest.mark.parametrize("name", ["plan.csv", "plan.csv.gz", "plan"])
def test_lifespans_are_kept_and_ordered_by_lower(tmp_path, name):
    trace = load(tmp_path, "id,lower,upper,size\n7,5,9,100\n3,0,6,10\n", name)
    assert trace.start.tolist() == [0, 5]
    assert trace.end.tolist() == [6, 9]
    assert trace.size.tolist() == [10, 100]
    assert trace.extra["id"].tolist() == [3, 7]
    assert (trace.num_events, len(trace.action), trace.info["source"]) == (9, 0, "planning csv")
    assert peak_load(trace.start, trace.end, trace.size) == 110


def test_offsets_streams_and_named_ids_are_kept_through_a_file(tmp_path):
    trace = load(tmp_path, "id,lower,upper,size,stream,offset\nb,5,9,100,4,512\na,0,6,10,9,0\n")
    save_traces(tmp_path / "x.trace.npz", [trace])
    (loaded,) = load_traces(tmp_path / "x.trace.npz")
    for each in (trace, loaded):
        assert each.extra["id"].tolist() == ["a", "b"]
        assert each.extra["offset"].tolist() == [0, 512]
        assert [each.streams[i] for i in each.stream] == [9, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,lower,upper,size\n", "no lifespans"),
        ("id,lower,upper,size\n1,2,3\n", "line 2 has 3 cells, the header 4"),
        ("id,lower,upper,size\n1,0,3,5\n2,4,4,5\n", "line 3: upper is not above lower"),
        ("id,lower,upper,size\n1,0,3,-5\n", "line 2: size is '-5'"),
        ("id,lower,upper,size\n1,0,3,1e9\n", "line 2: size is '1e9'"),
        ("id,lower,upper,size\n1,0,99999999999999999999,1\n", "line 2: upper is '9999"),
    ],
)
def test_mistakes_are_named_by_line(tmp_path, text, said):
    with pytest.raises(BadInputError, match=said):
        load(tmp_path, text)


def test_published_instances_have_their_published_load(shared_instances, shared_traces):
    for letter in "ABEFGHIK":
        (trace,) = load_traces(shared_instances / f"{letter}.1048576.csv")
        assert peak_load(trace.start, trace.end, trace.size) == 1048576, letter
    for name, count in {"iopddl_G_1.csv": 816, "iopddl_S_1.csv.gz": 28526, "pangu_2.6B.csv.gz": 18692}.items():
        (trace,) = load_traces(shared_instances / name)
        assert trace.num_requests == count
    (trace,) = load_traces(shared_traces / "somas_resnet50.csv.gz")
    assert (peak_load(trace.start, trace.end, trace.size), lower_bound(trace)) == (1515472556, 1515477504)
