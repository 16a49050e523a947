"""HTML pages of memory_viz: the snapshot or the elements inside them, and nothing else of the page."""

import base64
import json
import os
import pickle

import pytest
from recordings import path_of

from stalloc.errors import BadInputError
from stalloc.lifespans import lower_bound, peak_load
from stalloc.planner import plan, validate
from stalloc.trace import load_traces


def test_the_real_page_gives_the_published_figures(shared_traces):
    (trace,) = load_traces(shared_traces / "resnet18_zdevito.html.gz")
    figures = (trace.num_events, trace.num_requests, peak_load(trace.start, trace.end, trace.size))
    assert (*figures, lower_bound(trace, 512)) == (664, 458, 303624744, 303644672)
    made = plan(trace, alignment=512)
    assert validate(made, trace).ok
    assert made.peak_bytes == lower_bound(trace, 512)


def test_a_page_of_torch_is_the_snapshot_that_it_was_made_of():
    (trace,), (snapshot,) = load_traces(path_of("page.html.gz")), load_traces(path_of("training.pickle.gz"))
    assert trace.info["source"] == "memory_viz page"
    for column in ("start", "end", "size", "address"):
        assert (getattr(trace, column) == getattr(snapshot, column)).all(), column
    made = plan(trace, alignment=512)
    assert validate(made, trace).ok
    assert made.peak_bytes == lower_bound(trace, 512)


def load(tmp_path, script):
    path = tmp_path / "page.html"
    path.write_text(f"\n<!DOCTYPE html>\n<html><script type='module'>\n{script}\n</script></html>")
    return load_traces(path)


def elements(**changes):
    content = {"actions": [0, 1, 0, 2, 0], "elements_size": [100, 200, 300], "initially_allocated": [2]}
    return f"import * as d3 from 'd3'\nlet alloc_data = {json.dumps(content | changes)}\n\nlet width = {{}}"


def test_the_first_mention_of_an_element_allocates_and_the_next_frees(tmp_path):
    (trace,) = load(tmp_path, elements())
    lifespans = list(zip(trace.start.tolist(), trace.end.tolist(), trace.size.tolist(), strict=True))
    assert lifespans == [(-1, 3, 300), (0, 2, 100), (1, 5, 200), (4, 5, 100)]
    assert (trace.info["source"], trace.info["complete"]) == ("memory_viz page", False)


def test_what_was_there_before_and_stays_is_counted(tmp_path):
    (trace,) = load(tmp_path, elements(actions=[0], initially_allocated=[2, 1]))
    assert trace.start.tolist() == [-1, -1, 0]
    assert trace.end.tolist() == [1, 1, 1]
    assert sorted(trace.size.tolist()) == [100, 200, 300]
    assert trace.event_request.tolist() == [2]


def snapshot_page(data: bytes) -> str:
    return f"const local_files = {json.dumps([{'name': 'snapshot.pickle', 'base64': base64.b64encode(data).decode()}])}"


def snapshot(**changes):
    history = [{"action": "alloc", "addr": 4096, "size": 100, "stream": 0, "time_us": 5}]
    block = {"size": 512, "requested_size": 100, "state": "active_allocated"}
    segment = {"device": 0, "address": 4096, "total_size": 512, "stream": 0, "blocks": [block]}
    return {"segments": [segment], "device_traces": [history]} | changes


def test_a_page_that_carries_a_snapshot_is_read_as_one(tmp_path):
    (trace,) = load(tmp_path, snapshot_page(pickle.dumps(snapshot()) + b"\0\0"))  # padded as torch does
    assert (trace.size.tolist(), trace.address.tolist()) == ([100], [4096])
    assert trace.info["source"] == "memory_viz page"


class Runs:
    def __reduce__(self):
        return (os.mkdir, ("sprung",))


def test_a_snapshot_in_a_page_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError, match=r"asks for '(posix|os)\.mkdir'"):
        load(tmp_path, snapshot_page(pickle.dumps(snapshot(segments=[Runs()]))))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("<img src='data:image/png;base64,AAAA'>", "holds no snapshot data"),
        (snapshot_page(b"x") * 2, "holds 2 snapshots"),
        ('[{"base64": "!!!!"}]', "snapshot in the page is damaged"),
        (snapshot_page(b""), "cut short"),
        (snapshot_page(pickle.dumps([1])), "not a torch.cuda.memory snapshot"),
        (elements()[:80], "damaged or cut short"),
        (elements(actions=3), "no lists of actions and sizes"),
        (elements(actions=[]), "no allocations and no frees"),
        (elements(actions=[3]), "entry 0 of actions: element is 3"),
        (elements(actions=[-1]), "entry 0 of actions: element is -1"),
        (elements(actions=[[]]), "entry 0 of actions: element is a list"),
        (elements(elements_size=[1, 2, "3"]), "element 2: size is '3'"),
        (elements(elements_size=[1, 2, 1 << 70]), "element 2: size is 1180591620717411303424"),
        (elements(initially_allocated=[True]), "entry 0 of initially_allocated: element is True"),
        ("let alloc_data = {}", "damaged or cut short"),
        ("let alloc_data = {" + '"a":[' * 5000, "damaged or cut short"),
    ],
)
def test_a_page_without_usable_data_is_refused_in_one_sentence(tmp_path, script, said):
    with pytest.raises(BadInputError, match=said) as caught:
        load(tmp_path, script)
    assert "\n" not in str(caught.value)
