"""Logs of RMM and of the DTR simulator: real ones give the published figures, tiny ones show each rule."""

import gzip
import json

import pytest

from stalloc.cli import main
from stalloc.errors import BadInputError
from stalloc.lifespans import find_period, lower_bound, peak_load, sequence_keys, sequence_rows
from stalloc.planner import plan, validate
from stalloc.trace import Action, load_traces

# name: events, requests, peak of requested bytes, the same rounded up to 512, period
FIGURES = {
    "dtr_resnet32": (1009, 646, 10061179152, 10061265408, None),
    # published as 70, which is twice the shortest period
    "dtr_transformer": (3112, 1812, 9864405000, 9864413184, 35),
}


@pytest.mark.parametrize("name", FIGURES)
def test_real_logs_give_the_published_figures(shared_traces, name):
    (trace,) = load_traces(shared_traces / f"{name}.log.gz")
    period = find_period(sequence_keys(trace, sequence_rows(trace, 0)), min_repeats=3, min_length=32, at_end=True)
    assert FIGURES[name] == (
        trace.num_events,
        trace.num_requests,
        peak_load(trace.start, trace.end, trace.size),
        lower_bound(trace, 512),
        period.length if period else None,
    )
    made = plan(trace, alignment=512)
    assert validate(made, trace).ok
    assert made.peak_bytes == lower_bound(trace, 512)


def test_every_real_log_is_in_the_table(shared_traces):
    assert {path.name.removesuffix(".log.gz") for path in shared_traces.glob("*.log.gz")} == set(FIGURES)


def load(tmp_path, text, name):
    path = tmp_path / name
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (trace,) = load_traces(path)
    return trace


def lifespans(trace):
    return list(zip(trace.start.tolist(), trace.end.tolist(), trace.size.tolist(), strict=True))


RMM = """Thread,Time,Action,Pointer,Size,Stream
4242,10:00:00.000001,allocate,0x7f0000000000,1000,0x0
4243,10:00:00:000002,allocate,0x7f0000000400,256,0x2
4242,10:00:01.000000,allocate failure,(nil),99999999999,0
4242,10:00:02.000000,allocate,0x0,0,0
4242,10:00:02.000000,free,0x0,0,0
4242,10:01:00.000000,free,0x7f0000000000,1000,0x2
4242,10:01:00.000000,free,0x7e0000000000,300,0
4243,11:00:00.000000,allocate,7f0000000000,500,0
"""


@pytest.mark.parametrize("name", ["rmm.csv", "rmm.dev0.txt.gz"])
def test_a_log_of_rmm(tmp_path, name):
    trace = load(tmp_path, RMM, name)
    alloc, free, oom = Action.ALLOC, Action.FREE_COMPLETED, Action.OOM
    assert trace.action.tolist() == [alloc, alloc, oom, free, free, alloc]
    assert lifespans(trace) == [(-1, 4, 300), (0, 3, 1000), (1, 6, 256), (5, 6, 500)]
    assert trace.address[[0, 5]].tolist() == [0x7F0000000000] * 2
    assert [trace.streams[i] for i in trace.event_stream] == [0, 2, 0, 2, 0, 0]
    assert trace.time_us[[0, 1, 5]].tolist() == [36000000001, 36000000002, 39600000000]
    assert (trace.device, trace.info["source"], trace.info["complete"]) == (0, "rmm log", False)


def test_the_device_of_a_log_of_rmm_is_in_its_name(tmp_path):
    assert load(tmp_path, RMM, "rmm.dev12.log").device == 12


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "no allocations and no frees"),
        ("1,10:00:00.000000,allocate,0x10,8\n", "line 2 is not"),
        ("1,x,allocate,0x10,8,0\n1,x,allo\n", "line 3 is not"),
        ("1,x,reallocate,0x10,8,0\n", "line 2 is not"),
        ("1,x,allocate,zz,8,0\n", "line 2 is not"),
        ("1,x,allocate,0x10,-8,0\n", "line 2 is not"),
        ("1,x,allocate,0x10,99999999999999999999,0\n", "line 2 is not"),
        ("1,x,allocate,0x1ffffffffffffffff,8,0\n", "line 2 is not"),
        ("1,x,allocate,0x10,8,0\n1,x,allocate,0x10,8,0\n", "event 1 says that address 0x10 is allocated twice"),
    ],
)
def test_what_rmm_does_not_write_is_refused(tmp_path, rows, said):
    with pytest.raises(BadInputError, match=said) as caught:
        load(tmp_path, RMM.splitlines()[0] + "\n" + rows, "rmm.csv")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_log_of_rmm_with_a_mark_before_its_text(tmp_path, encoding):
    trace = load(tmp_path, RMM.encode(encoding), "rmm.csv")
    assert lifespans(trace) == [(-1, 4, 300), (0, 3, 1000), (1, 6, 256), (5, 6, 500)]


def test_a_failure_in_a_log_of_rmm_has_no_cause_where_nothing_tells_it(tmp_path, capsys):
    """The log does not say what was free on the device."""
    path = tmp_path / "rmm.csv"
    path.write_text("".join(RMM.splitlines(keepends=True)[:4]))
    assert main(["explain", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not say how much was free on the device" in shown
    assert "0 B on the device" not in shown
    assert main(["explain", str(path), "--json", "-"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert (device["verdict"], device["device_free_bytes"], device["avoided_by"]) == ("unknown", None, [])
    assert main(["simulate", "--advise", str(path), "--json", "-"]) == 0
    assert all(one["fits"] for one in json.loads(capsys.readouterr().out)["ranking"])


def test_a_last_line_of_rmm_that_is_cut_short_is_left_out(tmp_path):
    trace = load(tmp_path, f"{RMM}4243,11:00:01.000000,allo", "rmm.csv")
    assert trace.num_events == 6
    assert any("cut short" in note for note in trace.info["notes"])


def test_rows_of_rmm_without_columns_are_found_among_other_lines(tmp_path):
    rows = RMM.splitlines(keepends=True)[1:]
    trace = load(tmp_path, "24/01/01 INFO RapidsPluginUtils: starting\n" + "INFO other\n".join(rows), "stderr.log")
    assert lifespans(trace) == [(-1, 4, 300), (0, 3, 1000), (1, 6, 256), (5, 6, 500)]


OLD_RMM = """Event Type,Device ID,Address,Stream,Size (bytes),Free Memory,Total Memory,Current Allocs,Start,End,Elapsed
Alloc,0,0x7fae06600000,0,80,0,0,1,1.5,1.6,0.1
Alloc,1,0x7fae06600000,(nil),4096,0,0,1,2.25,2.5,0.25
Realloc,0,0x7fae06600000,0,160,0,0,1,3,3.1,0.1
Free,0,0x7fae06600000,0,0,0,0,0,4.1e0,4.2,0.1
"""


def test_the_log_of_an_old_rmm_has_a_column_for_the_device(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text(OLD_RMM)
    first, second = load_traces(path)
    assert (first.device, second.device) == (0, 1)
    assert lifespans(first) == [(0, 1, 80), (2, 3, 160)]
    assert lifespans(second) == [(0, 1, 4096)]
    assert first.time_us.tolist() == [1_500_000, 3_000_000, 3_000_000, 4_100_000]


DTR = """{"ANNOTATION":"START","INSTRUCTION":"ANNOTATE"}
{"INSTRUCTION":"CONSTANT","NAME":"weight"}
{"INSTRUCTION":"MEMORY","MEMORY":"1000","NAME":"weight"}
{"DST":"w","INSTRUCTION":"COPY","SRC":"weight"}
{"INSTRUCTION":"RELEASE","NAME":"weight"}
{"ARGS":["w"],"INSTRUCTION":"CALL","NAME":"mm","RESULT":["y"],"TIME":"5"}
{"INSTRUCTION":"MEMORY","MEMORY":"64","NAME":"y"}
{"ALIAS":"-1","INSTRUCTION":"ALIAS","NAME":"y"}
{"ARGS":["y","w"],"INSTRUCTION":"CALL","NAME":"view","RESULT":["v","e"],"TIME":"1"}
{"INSTRUCTION":"MEMORY","MEMORY":"64","NAME":"v"}
{"ALIAS":"0","INSTRUCTION":"ALIAS","NAME":"v"}
{"INSTRUCTION":"MEMORY","MEMORY":"0","NAME":"e"}
{"ALIAS":"-1","INSTRUCTION":"ALIAS","NAME":"e"}
{"ARGS":["v"],"INSTRUCTION":"MUTATE","MUTATE":[0],"NAME":"add_","TIME":"1"}
{"ANNOTATION":"BACKWARD","INSTRUCTION":"ANNOTATE"}
{"INSTRUCTION":"RELEASE","NAME":"y"}
{"INSTRUCTION":"RELEASE","NAME":"w"}
{"INSTRUCTION":"RELEASE","NAME":"v"}

{"INSTRUCTION":"RELEASE","NAME":"e"}
"""


@pytest.mark.parametrize("name", ["dtr.log", "dtr.log.gz"])
def test_a_storage_lives_until_its_last_alias_is_released(tmp_path, name):
    trace = load(tmp_path, DTR, name)
    assert lifespans(trace) == [(0, 2, 1000), (1, 3, 64)]
    assert [(trace.names[i], event) for i, event in zip(trace.mark_name, trace.mark_event, strict=True)] == [
        ("start", 0),
        ("start", 2),
        ("backward", 2),
    ]
    assert (trace.info["source"], trace.info["complete"]) == ("dtr log", True)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('{"INSTRUCTION":"RELEASE","NAME":"w"}', "line 21 is no instruction that fits"),
        ('{"INSTRUCTION":"COPY","SRC":"nobody","DST":"x"}', "line 21 is no instruction that fits"),
        ('{"INSTRUCTION":"DANCE"}', "unknown instruction 'DANCE'"),
        ('{"INSTRUCTION":"ALIAS","ALIAS":"7","NAME":"x"}', "line 21 is no instruction that fits"),
        ('{"INSTRUCTION":"MEMORY","MEMORY":Infinity,"NAME":"x"}', "line 21 is no instruction that fits"),
        ("[1, 2]", "line 21 is no instruction that fits"),
        ('{"INSTRUCTION":"RELE', "line 21 is not readable as JSON"),
        ("[" * 5000, "line 21 is not readable as JSON"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path, more, said):
    with pytest.raises(BadInputError, match=said):
        load(tmp_path, DTR + more, "dtr.log")


@pytest.mark.parametrize("name", ["dtr.log", "rmm.csv", "trace.json", "page.html", "page.html.gz"])
@pytest.mark.parametrize("text", ["", " \n\n"])
def test_an_empty_file_is_named(tmp_path, name, text):
    with pytest.raises(BadInputError, match="is empty"):
        load(tmp_path, text, name)
