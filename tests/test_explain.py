"""stalloc explain: every byte between reserved and allocated has one cause, on real snapshots and on made-up ones."""

import json
import pickle

import numpy as np
import pytest
from recordings import SNAPSHOTS, each, path_of

from stalloc.analysis import explain
from stalloc.cli import main
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.replay.simulation import Candidate, run_one, simulate
from stalloc.trace import Action, load_traces

MIB = 1 << 20
ADDRESS = 0x7F00_0000_0000


def event(action, place, size, stream=0, site="step.py", **more):
    frames = [{"filename": site, "line": 1, "name": "f"}]
    return {"action": action, "addr": ADDRESS + place, "size": size, "stream": stream, "frames": frames} | more


def segment(place, *blocks, stream=0, pool=(0, 0)):
    size = sum(block_size for block_size, _, _ in blocks)
    listed, at = [], ADDRESS + place
    for block_size, requested, state in blocks:
        listed.append({"address": at, "size": block_size, "requested_size": requested, "state": state})
        at += block_size
    return {
        "device": 0,
        "address": ADDRESS + place,
        "total_size": size,
        "stream": stream,
        "segment_type": "large",
        "segment_pool_id": pool,
        "is_expandable": False,
        "blocks": listed,
    }


LIVE, FREE, WAITING = "active_allocated", "inactive", "active_pending_free"


def write(path, events, segments):
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [events], "allocator_settings": {}}))
    return path


@pytest.fixture
def every_cause(tmp_path):
    """One segment for each cause."""
    a, b, c, d, e = (place * 64 * MIB for place in range(5))
    events = [
        *(
            event("segment_alloc", place, 20 * MIB, stream)
            for place, stream in ((a, 0), (b, 7), (c, 7), (d, 0), (e, 0))
        ),
        event("alloc", b, 20 * MIB, 7),
        event("free_requested", b, 20 * MIB, 7),
        event("free_completed", b, 20 * MIB, 7),
        event("alloc", c, 4 * MIB, 7, "other.py"),
        event("alloc", d, 20 * MIB),
        event("free_requested", d, 20 * MIB),
        event("alloc", e, 10 * MIB),
        event("alloc", a, 4 * MIB - 100),
        event("alloc", a + 4 * MIB, 4 * MIB),
        event("alloc", a + 8 * MIB, 4 * MIB, site="holds.py"),
        event("free_requested", a + 4 * MIB, 4 * MIB),
        event("free_completed", a + 4 * MIB, 4 * MIB),
    ]
    segments = [
        segment(
            a,
            (4 * MIB, 4 * MIB - 100, LIVE),
            (4 * MIB, 0, FREE),
            (4 * MIB, 4 * MIB, LIVE),
            (8 * MIB, 0, FREE),
        ),
        segment(b, (20 * MIB, 0, FREE), stream=7),
        segment(c, (4 * MIB, 4 * MIB, LIVE), (16 * MIB, 0, FREE), stream=7),
        segment(d, (20 * MIB, 20 * MIB, WAITING)),
        segment(e, (10 * MIB, 10 * MIB, LIVE), (10 * MIB, 0, FREE), pool=(0, 1)),
    ]
    return write(tmp_path / "every.pickle", events, segments)


def test_each_cause_has_its_bytes(every_cause):
    (trace,) = load_traces(every_cause)
    made = explain(trace, trace.num_events - 1)
    assert made.reserved_bytes == 100 * MIB
    assert made.allocated_bytes == 22 * MIB - 100
    assert made.causes == {
        "rounding": 100,
        "hard_fragmentation": 4 * MIB,
        "soft_fragmentation": 8 * MIB,
        "other_streams": 16 * MIB,
        "private_pools": 10 * MIB,
        "waiting_frees": 20 * MIB,
        "cache_never_returned": 20 * MIB,
    }


def test_only_a_simulation_is_held_against_the_record(every_cause):
    (trace,) = load_traces(every_cause)
    of_the_record = Candidate("torch")
    assert run_one(trace, of_the_record).exact is None  # explain tries many settings, and nobody reads this of them
    (simulated,) = simulate(trace, [of_the_record])
    assert simulated.exact is not None


def test_call_sites_carry_what_stays_because_of_them(every_cause):
    (trace,) = load_traces(every_cause)
    made = explain(trace, trace.num_events - 1)
    # 12 MiB stay with two blocks, 16 with the one of another stream, 10 with one in the private pool
    assert made.sites == {"other.py:1 f": 16 * MIB, "step.py:1 f": 16 * MIB, "holds.py:1 f": 6 * MIB}
    assert [(s.free_bytes, s.num_blocks) for s in made.segments] == [(16 * MIB, 1), (12 * MIB, 2), (10 * MIB, 1)]


def test_a_segment_that_is_used_again_is_not_called_never_returned(every_cause):
    (trace,) = load_traces(every_cause)
    before_its_use = 4  # the last of the five segment_alloc events; nothing is live
    made = explain(trace, before_its_use)
    assert made.allocated_bytes == 0
    assert made.causes["cache_never_returned"] == 0
    assert sum(made.causes.values()) == made.reserved_bytes == 100 * MIB


def out_of_memory(tmp_path, device_free, wanted):
    events = [
        event("segment_alloc", 0, 20 * MIB),
        event("alloc", 0, 8 * MIB, site="keeps.py"),
        {"action": "oom", "device_free": device_free, "size": wanted, "stream": 0, "frames": []},
    ]
    return write(tmp_path / "oom.pickle", events, [segment(0, (8 * MIB, 8 * MIB, LIVE), (12 * MIB, 0, FREE))])


@pytest.mark.slow
def test_an_out_of_memory_error_with_enough_in_all_is_fragmentation(tmp_path, capsys):
    file = out_of_memory(tmp_path, device_free=10 * MIB, wanted=22 * MIB)
    assert main(["explain", str(file), "--json", "-"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["devices"]
    assert said["verdict"] == "fragmentation"
    assert (said["wanted_bytes"], said["device_free_bytes"]) == (22 * MIB, 10 * MIB)
    assert (said["partly_used_bytes"], said["largest_free_bytes"]) == (12 * MIB, 12 * MIB)


def test_an_out_of_memory_error_with_too_little_in_all_is_capacity(tmp_path, capsys):
    file = out_of_memory(tmp_path, device_free=10 * MIB, wanted=22 * MIB + 1)
    assert main(["explain", str(file), "--at", "oom"]) == 0
    said = capsys.readouterr().out
    assert "Out of memory because of capacity: " in said
    assert "keeps.py:1 f" in said


@pytest.mark.parametrize(("wanted", "verdict"), [(36 * MIB, "fragmentation"), (36 * MIB + 1, "capacity")])
def test_what_is_free_for_any_stream_decides_and_that_of_the_stream_is_told(tmp_path, wanted, verdict):
    others = segment(64 * MIB, (2 * MIB, 2 * MIB, LIVE), (14 * MIB, 0, FREE), stream=7)
    events = [
        event("segment_alloc", 0, 20 * MIB),
        event("segment_alloc", 64 * MIB, 16 * MIB, 7),
        event("alloc", 0, 8 * MIB),
        event("alloc", 64 * MIB, 2 * MIB, 7),
        {"action": "oom", "device_free": 10 * MIB, "size": wanted, "stream": 0, "frames": []},
    ]
    own = segment(0, (8 * MIB, 8 * MIB, LIVE), (12 * MIB, 0, FREE))
    (trace,) = load_traces(write(tmp_path / "oom.pickle", events, [own, others]))
    error = explain(trace, "oom", advise=False).out_of_memory
    assert error.verdict == verdict
    assert (error.partly_used_bytes, error.largest_free_bytes, error.same_stream_bytes) == (
        26 * MIB,
        12 * MIB,
        12 * MIB,
    )


@pytest.mark.parametrize("name", each(SNAPSHOTS))
def test_causes_of_real_snapshots_add_up(name):
    rng = np.random.default_rng(4)
    for trace in load_traces(path_of(name)):
        for moment in ("peak", int(rng.integers(trace.num_events))):
            made = explain(trace, moment, advise=False)
            where = f"device {trace.device} at {moment}"
            reserved = np.append(trace.reserved_bytes(), trace.reserved_start_bytes)
            asked = trace.free_requested > made.event
            live = asked & (trace.start <= made.event) & (made.event < trace.end)
            assert made.reserved_bytes == reserved[made.event], where
            assert made.allocated_bytes == trace.size[live].sum(), where
            assert sum(made.causes.values()) == made.reserved_bytes - made.allocated_bytes, where
            assert min(made.causes.values()) >= 0, where


#: what was requested, what was free on the device and in partly used segments, in GiB
RAN_OUT = [("out_of_memory.pickle.gz", 0.34, 0.31, 0.17), ("llama3_8b_fsdp4_oom_rank0.pickle.gz", 3.91, 3.75, 0.79)]


@pytest.mark.parametrize(("name", "wanted", "free", "partly_used"), each(RAN_OUT))
def test_a_run_that_failed_by_fragmentation_says_what_would_have_helped(capsys, name, wanted, free, partly_used):
    file = str(path_of(name))
    assert main(["explain", file, "--at", "oom", "--json", "-"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["devices"]
    assert said["verdict"] == "fragmentation"
    assert round(said["wanted_bytes"] / 2**30, 2) == wanted
    assert round(said["device_free_bytes"] / 2**30, 2) == free
    assert round(said["partly_used_bytes"] / 2**30, 2) == partly_used
    capacity = said["reserved_bytes"] + said["device_free_bytes"]
    helped = {(entry["allocator"], entry["settings"]): entry["peak_reserved_bytes"] for entry in said["avoided_by"]}
    assert {("torch", "expandable_segments:True"), ("stalloc", "")} <= helped.keys()
    assert max(helped.values()) <= capacity
    assert said["fails_again"]  # the replay runs out of memory at the same event with the settings of the file


def test_a_trace_without_segments_is_replayed_and_says_so(capsys):
    file = str(path_of("lifespans.csv.gz"))
    assert main(["explain", file, "--json", "-"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["devices"]
    assert "replayed" in said["source"]
    assert sum(said["causes"].values()) == said["reserved_bytes"] - said["allocated_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--at", "17"], "has events 0 to 16: there is no event 17"),
        (["--at", "sometime"], "give peak, oom or the index of an event"),
        (["--at", "oom"], "no out-of-memory event"),
        (["--device", "3"], "no events of device 3"),
    ],
)
def test_a_moment_that_does_not_exist_is_one_sentence(every_cause, capsys, arguments, sentence):
    assert main(["explain", str(every_cause), *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_an_oom_event_is_asked_for_where_there_is_none(every_cause):
    (trace,) = load_traces(every_cause)
    assert not np.any(trace.action == Action.OOM)
    with pytest.raises(BadInputError, match="no out-of-memory event"):
        explain(trace, "oom")


def test_a_profile_tells_how_much_was_reserved_and_not_where(capsys):
    file = str(path_of("profile.json.gz"))
    assert main(["explain", file]) == 0
    shown = capsys.readouterr().out
    assert "the file does not say where what was reserved lies" in shown
    assert "MiB in a model, allocated" in shown
    assert main(["stats", file, "--json", "-"]) == 0
    recorded = json.loads(capsys.readouterr().out)["devices"][0]["reserved_peak_bytes"]
    assert f"reserved peak {human_bytes(recorded)}" in shown


def test_a_setting_of_an_unknown_release_goes_by_the_name_that_all_of_them_read(capsys):
    file = str(path_of("out_of_memory.pickle.gz"))
    assert main(["explain", file]) == 0
    assert " PYTORCH_ALLOC_CONF=" not in capsys.readouterr().out
    assert main(["simulate", "--sweep", file]) == 0
    assert " PYTORCH_ALLOC_CONF=" not in capsys.readouterr().out


def test_a_snapshot_as_json_in_utf_16_is_no_log(tmp_path, capsys):
    """As Windows PowerShell writes what a program prints."""
    blocks = [(2 * MIB, 2 * MIB, LIVE), (18 * MIB, 18 * MIB, FREE)]
    events = [event("segment_alloc", 0, 20 * MIB), event("alloc", 0, 2 * MIB)]
    file = tmp_path / "snapshot.json"
    snapshot = {"segments": [segment(0, *blocks)], "device_traces": [events]}
    file.write_text(json.dumps(snapshot), encoding="utf-16")
    assert main(["explain", str(file)]) == 0
    assert "reserved 20.00 MiB, allocated 2.00 MiB" in capsys.readouterr().out
