"""Inputs from the field: what is concluded from each is right."""

import json

import pytest
from recordings import path_of

from stalloc.cli import main

MIB, GIB = 1 << 20, 1 << 30


def result(capsys, *words, code=0):
    assert main([*words, "--json", "-"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("process_has_0_bytes", {"others_bytes": GIB, "outside_bytes": None, "verdict": "capacity"}),
        ("free_on_device_exceeds_request", {"verdict": "outside"}),
        ("free_exceeds_capacity", {"verdict": "contradiction", "others_bytes": None}),
        (
            "npu_figures_not_read",
            {"device": 3, "total_bytes": 60 * GIB, "unallocated_bytes": 8 * GIB, "verdict": "fragmentation"},
        ),
        ("torch_2_0_text_gets_expandable_segments", {"release": "1.4 to 2.0", "verdict": "fragmentation"}),
        ("torch_1_text_gets_new_variable", {"release": "until 1.3", "unallocated_bytes": 11 * GIB // 2}),
        ("cupy_limit_allocated_so_far", {"reserved_bytes": 512 * MIB, "allocated_bytes": None, "verdict": "limit"}),
        ("cupy_before_7", {"library": "CuPy", "wanted_bytes": GIB, "reserved_bytes": 11_300_152_832}),
        ("rmm_cuda_failed_to_allocate", {"library": "RMM", "wanted_bytes": 80 * GIB}),
        ("rmm_pool_old", {"library": "RMM", "verdict": "limit"}),
        ("rmm_pool_starts_with_bracket", {"wanted_bytes": 10 * GIB, "limit_bytes": 78 * GIB, "verdict": "limit"}),
        ("pinned_host_memory", {"place": "host", "wanted_bytes": 32 * GIB}),
        ("mps", {"backend": "MPS", "allocated_bytes": 9 * GIB, "limit_bytes": 27 * GIB}),
        ("truncated_after_free", {"free_bytes": 187 * MIB, "reserved_bytes": None, "verdict": "unknown"}),
        ("xpu_without_free", {"backend": "XPU", "free_bytes": None, "verdict": "capacity"}),
        ("syslog", {"wanted_bytes": 4 * GIB, "verdict": "fragmentation"}),
        ("docker_json", {"wanted_bytes": 4 * GIB, "verdict": "fragmentation"}),
        ("powershell_utf16", {"wanted_bytes": 4 * GIB, "verdict": "fragmentation"}),
        ("log.gz", {"wanted_bytes": 4 * GIB, "verdict": "fragmentation"}),
    ],
)
def test_an_error_is_read_in_full(shared_field, capsys, name, figures):
    file = shared_field / (name if "." in name else f"{name}.log")
    (error,) = result(capsys, "explain", str(file))["errors"]
    assert {key: error[key] for key in figures} == figures


def test_a_log_of_another_error_is_a_log(shared_field, capsys):
    assert main(["explain", str(shared_field / "bracket_log_without_oom.log")]) == 2
    assert "a log without an out-of-memory error" in capsys.readouterr().err


def test_one_optimizer_step_does_not_grow(shared_field, capsys):
    (device,) = result(capsys, "top", str(shared_field / "one_optimizer_step_reported_as_growth.pickle.gz"))["devices"]
    assert device["growth"] == []


def test_one_event_ranks_nothing(shared_field, capsys):
    said = result(capsys, "simulate", "--advise", str(shared_field / "one_event_advise.pickle"))
    assert (said["export"], said["ranking"], said["recorded_reserved_peak_bytes"]) == (None, [], 28 * MIB)


def test_a_snapshot_without_history_is_explained(shared_field, capsys):
    (device,) = result(capsys, "explain", str(shared_field / "snapshot_without_history.pickle"))["devices"]
    assert (device["reserved_bytes"], device["allocated_bytes"]) == (3 * GIB, 624 * MIB)
    assert device["causes"]["cache_never_returned"] == 2 * GIB
    assert "model.py:10 forward" in device["sites"]


def test_our_snapshots_without_history_are_read(capsys):
    """What a program holds that allocated 600, 24, 2048, 8 and 28 MiB and freed the third."""
    (device,) = result(capsys, "explain", str(path_of("no_history.pickle.gz")))["devices"]
    assert (device["reserved_bytes"], device["allocated_bytes"]) == ((600 + 24 + 2048 + 20 + 28) * MIB, 660 * MIB)
    assert device["causes"]["cache_never_returned"] == 2 * GIB
    # the last one is freed, which is recorded
    said = result(capsys, "simulate", "--advise", str(path_of("one_event.pickle.gz")))
    assert (said["export"], said["ranking"]) == (None, [])


def test_our_error_is_read_as_our_snapshot_of_it(capsys):
    (error,) = result(capsys, "explain", str(path_of("out_of_memory.log")))["errors"]
    (device,) = result(capsys, "explain", str(path_of("out_of_memory.pickle.gz")))["devices"]
    for name in ("verdict", "wanted_bytes"):
        assert error[name] == device[name]
    assert error["free_bytes"] == device["device_free_bytes"]


def test_what_a_profile_does_not_tell_is_unknown(shared_field, capsys):
    (device,) = result(capsys, "timeline", str(shared_field / "rocm_copies_without_bytes.json"))["devices"]
    assert device["links"][0]["num_bytes"] is None
    (device,) = result(capsys, "timeline", str(shared_field / "headroom_without_totals.json"))["devices"]
    assert any("at most 31.00 GiB" in sentence for sentence in device["findings"])
