"""stalloc stats: what it says of real and of tiny traces, as text and as JSON."""

import json
import pickle
import shlex

import networkx as nx
import pytest
from recordings import ALL, each, path_of

from stalloc.analysis import summarize
from stalloc.cli import main
from stalloc.trace import load_traces

ADDRESS = 0x7F00_0000_0000


def event(action, place, size):
    return {"action": action, "addr": ADDRESS + place, "size": size, "stream": 0, "time_us": 0}


def write_snapshot(path):
    """Two requests of 600 and 1000 bytes in a segment of 4096, the first of them freed."""
    history = [
        event("segment_alloc", 0, 4096),
        event("alloc", 0, 600),
        event("alloc", 1024, 1000),
        event("free_requested", 0, 600),
        event("free_completed", 0, 600),
    ]
    blocks = [
        {"size": 1024, "state": "inactive"},
        {"size": 1024, "requested_size": 1000, "state": "active_allocated"},
        {"size": 2048, "state": "inactive"},
    ]
    segments = [{"device": 0, "address": ADDRESS, "total_size": 4096, "stream": 0, "blocks": blocks}]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [history]}))
    return str(path)


def test_json_holds_the_figures_of_each_device(tmp_path, capsys):
    file = write_snapshot(tmp_path / "s.pickle")
    assert main(["stats", file, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["files"] == [file]
    (device,) = result["devices"]
    expected = {
        "file": file,
        "device": 0,
        "events": 5,
        "requests": 2,
        "baseline_requests": 0,
        "distinct_sizes": 2,
        "lower_bound_bytes": 2048,
        "allocated_peak_bytes": 2048,
        "allocated_peak_event": 2,
        "allocated_peak_requested_bytes": 1600,
        "reserved_peak_bytes": 4096,
        "reserved_peak_event": 2,
        "fragmentation": 0.5,
        "streams": 1,
        "period_requests": None,
        "step_requests": None,
        "step_repeats": None,
    }
    assert {name: device[name] for name in expected} == expected
    assert sum(device["classes"][name]["requests"] for name in ("persistent", "scoped", "transient")) == 2


def test_of_several_moments_of_the_peak_the_first_is_named(tmp_path):
    file = tmp_path / "twice.csv"
    file.write_text("id,lower,upper,size\n0,0,2,512\n1,4,6,512\n")
    (trace,) = load_traces(file)
    assert (summarize(trace).allocated_peak_bytes, summarize(trace).allocated_peak_event) == (512, 0)


def test_alignment_changes_what_is_rounded(tmp_path, capsys):
    file = write_snapshot(tmp_path / "s.pickle")
    assert main(["stats", file, "--align", "1", "--json", "-"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["lower_bound_bytes"] == 1600
    assert main(["stats", file, "--align", "0"]) == 2
    assert "--align is 0" in capsys.readouterr().err


def test_text_shows_the_figures_and_the_next_command(tmp_path, capsys):
    file = write_snapshot(tmp_path / "[red]s.pickle")  # a name with markup is shown as it is
    assert main(["stats", file]) == 0
    shown = capsys.readouterr().out
    fragmentation = "50.00% (1 - allocated peak / reserved peak)"
    for text in ("[red]s.pickle, device 0", "2 in 5 events", fragmentation, "none confirmed"):
        assert text in shown
    assert shown.rstrip().endswith(f"stalloc plan {shlex.quote(file)}")


def test_planning_csv_has_no_reserved_and_several_files_are_listed(tmp_path, capsys):
    (tmp_path / "p.csv").write_text("id,lower,upper,size\n0,0,9,100\n1,3,5,1000\n")
    files = [str(tmp_path / "p.csv"), write_snapshot(tmp_path / "s.pickle")]
    assert main(["stats", *files, "--json", str(tmp_path / "out.json")]) == 0
    assert "reserved peak   4096 B" in capsys.readouterr().out
    first, second = json.loads((tmp_path / "out.json").read_text())["devices"]
    assert (first["reserved_peak_bytes"], first["fragmentation"]) == (None, None)
    assert (first["lower_bound_bytes"], first["events"]) == (512 + 1024, 4)
    assert second["file"] == files[1]


def test_bad_input_is_one_sentence_and_code_2(tmp_path, capsys):
    (tmp_path / "empty.pickle").touch()
    assert main(["stats", str(tmp_path / "empty.pickle")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stalloc: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "fragmentation", "period", "step"),
    each(
        [
            ("training.pickle.gz", 0.052278, 321, 318),
            ("step.pickle.gz", 0.078101, None, None),
            ("resnet50_pytorch_blog.pickle.gz", 1 - 521831936 / 589299712, 679, 613),
            ("lm_fwd_ctx200.pickle.gz", 1 - 879668224 / 945815552, None, 240),
            ("lm27b_ctx128_fullstep.pickle.gz", 1 - 54802668032 / 61111009280, None, None),
            ("cnn_counterfactuals.pickle.gz", None, 193, None),
            ("tiny_transformer.pickle.gz", None, 42, None),
            ("llm_quantize_sqattn.pickle.gz", None, 104, None),
        ],
        always=ALL,
    ),
)
def test_real_snapshots(name, fragmentation, period, step):
    file = str(path_of(name))
    (trace,) = load_traces(file)
    summary = summarize(trace)
    if fragmentation is not None:
        assert summary.fragmentation == pytest.approx(fragmentation, abs=1e-6)
    assert summary.period_requests == period
    if step is not None:
        assert summary.step_requests == step


PEAKS_BEFORE = [("stale_cache.pickle.gz", 1258291200), ("lm27b_compiled_fwd.pickle.gz", 51849986048)]


@pytest.mark.parametrize(("name", "peak"), each(PEAKS_BEFORE, always=ALL))
def test_a_peak_before_the_first_event_is_seen(name, peak):
    file = str(path_of(name))
    (trace,) = load_traces(file)
    summary = summarize(trace)
    assert (summary.reserved_peak_bytes, summary.reserved_peak_event) == (peak, -1)


def write_two_parts(path):
    """Two requests that are live together, and one that comes when they are gone."""
    path.write_text("id,lower,upper,size\n0,0,10,1000\n1,5,10,2000\n2,50,60,3000\n")
    return str(path)


def test_the_graph_of_lifespans_says_who_is_live_together_and_where_to_split(tmp_path, capsys):
    file, out = write_two_parts(tmp_path / "p.csv"), tmp_path / "graph.json"
    assert main(["stats", file, "--graph", str(out)]) == 0
    shown = capsys.readouterr().out
    (device,) = json.loads(out.read_text())["devices"]
    size = {node["id"]: node["size_bytes"] for node in device["nodes"]}
    assert sorted(size.values()) == [1000, 2000, 3000]
    assert [{size[one], size[other]} for one, other in device["edges"]] == [{1000, 2000}]
    assert any(10 <= event <= 50 for event in device["cut_events"])
    assert "3 groups, 1 overlaps" in shown
    assert f"before event {device['cut_events'][0]}" in shown


def test_the_graph_of_lifespans_is_read_by_graph_tools(tmp_path):
    file, out = write_two_parts(tmp_path / "p.csv"), tmp_path / "graph.graphml"
    assert main(["stats", file, "--graph", str(out)]) == 0
    graph = nx.read_graphml(out)
    assert sorted(told["bytes"] for _, told in graph.nodes(data=True)) == [1000, 2000, 3000]
    assert graph.number_of_edges() == 1


def test_a_graph_is_of_one_file_and_graphml_of_one_device(tmp_path, capsys):
    file, out = write_two_parts(tmp_path / "p.csv"), tmp_path / "graph.graphml"
    assert main(["stats", file, file, "--graph", str(out)]) == 2
    assert "--graph is for one file" in capsys.readouterr().err
    history = [event("alloc", 0, 600), event("free_requested", 0, 600), event("free_completed", 0, 600)]
    segments = [
        {"device": device, "address": ADDRESS, "total_size": 4096, "stream": 0, "blocks": []} for device in (0, 1)
    ]
    two = tmp_path / "two.pickle"
    two.write_bytes(pickle.dumps({"segments": segments, "device_traces": [history, history]}))
    assert main(["stats", str(two), "--graph", str(out)]) == 2
    assert "there are 2 devices" in capsys.readouterr().err
    assert not out.exists()
