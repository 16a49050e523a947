"""`stalloc top`: what is made once, layer by layer, does not grow from step to step; what is kept at each step does."""

import json
import pickle

import pytest

from stalloc.cli import main

MIB = 1 << 20
SCRATCH = [{"filename": "train.py", "line": 3, "name": "forward"}]


def snapshot(tmp_path, repeats, site, *, leaks=True, keeps=None, annotated=(), scratch=SCRATCH):
    """A program that does the same `repeats` times: scratch memory, and something that it keeps."""
    events, live, at = [], [], 1 << 30
    for number in range(repeats):
        for size, is_kept in ((3, False), (2, leaks and (keeps is None or number < keeps)), (5, False)):
            kept = {"addr": at, "size": size * MIB, "stream": 0, "frames": site if is_kept else scratch}
            at += size * MIB
            events.append({"action": "alloc", "time_us": len(events) + 1, **kept})
            if is_kept:
                live.append(kept)
            else:
                events += [
                    {"action": action, "time_us": len(events) + 1, **kept}
                    for action in ("free_requested", "free_completed")
                ]
    blocks = [
        {"address": one["addr"], "size": one["size"], "requested_size": one["size"], "state": "active_allocated"}
        for one in live
    ]
    segments = [
        {"device": 0, "address": one["address"], "total_size": one["size"], "stream": 0, "blocks": [one]}
        for one in blocks
    ]
    whole = {"device": 0, "address": 1 << 40, "total_size": 64 * MIB, "stream": 0, "blocks": []}
    notes = [
        {"stage": stage, "name": "Optimizer.step#Adam.step", "device": 0, "time_us": time}
        for begin, end in annotated
        for stage, time in (("START", begin), ("END", end))
    ]
    path = tmp_path / "run.pickle"
    path.write_bytes(
        pickle.dumps({"segments": [*segments, whole], "device_traces": [events], "external_annotations": notes})
    )
    return str(path), len(events)


def growth(capsys, path):
    assert main(["top", path, "--json", "-"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    return [(one["name"], one["bytes_per_step"]) for one in device["growth"]]


OURS = [{"filename": "train.py", "line": 9, "name": "keep"}]
STATE = [{"filename": "/x/torch/optim/adam.py", "line": 7, "name": "_init_group"}, *OURS]
OWN_OPTIMIZER = [{"filename": "my_optimizer.py", "line": 7, "name": "step"}, *OURS]


def test_what_each_step_keeps_grows(tmp_path, capsys):
    path, _ = snapshot(tmp_path, 20, OURS)
    assert growth(capsys, path) == [("train.py:9 keep", 2 * MIB)]


@pytest.mark.parametrize(("keeps", "grows"), [(34, False), (40, True)])
def test_what_is_full_by_the_end_does_not_grow(tmp_path, capsys, keeps, grows):
    path, _ = snapshot(tmp_path, 40, OURS, keeps=keeps)
    assert bool(growth(capsys, path)) is grows


def test_the_layers_of_one_annotated_step_are_no_steps(tmp_path, capsys):
    path, num = snapshot(tmp_path, 20, OURS)
    path, _ = snapshot(tmp_path, 20, OURS, annotated=[(1, num)])
    assert growth(capsys, path) == []


def test_annotated_steps_are_the_steps(tmp_path, capsys):
    per_step = 7 * 2  # two of the repetitions
    path, _ = snapshot(tmp_path, 20, OURS, annotated=[(at + 1, at + per_step) for at in range(0, 140, per_step)])
    assert growth(capsys, path) == [("train.py:9 keep", 4 * MIB)]


def test_what_the_next_step_begins_with_is_not_held_at_the_end_of_one(tmp_path, capsys):
    """Where the line that keeps memory asks for scratch memory too."""
    path, _ = snapshot(tmp_path, 20, OURS, scratch=OURS, annotated=[(at + 1, at + 14) for at in range(0, 140, 14)])
    assert growth(capsys, path) == [("train.py:9 keep", 4 * MIB)]


BACKWARD = [{"filename": "??", "line": 0, "name": "torch::autograd::AddmmBackward0::apply(…)"}]


@pytest.mark.parametrize(("site", "scratch"), [(STATE, SCRATCH), (OWN_OPTIMIZER, OWN_OPTIMIZER), (STATE, BACKWARD),
                                               (OWN_OPTIMIZER, BACKWARD)])  # fmt: skip
def test_state_that_an_optimizer_makes_layer_by_layer_is_made_once(tmp_path, capsys, site, scratch):
    path, _ = snapshot(tmp_path, 20, site, scratch=scratch)
    assert growth(capsys, path) == []


@pytest.mark.parametrize("annotated", [[], [(at + 6, at + 7) for at in range(0, 140, 7)]], ids=["repeats", "annotated"])
def test_what_an_optimizer_keeps_in_each_step_grows(tmp_path, capsys, annotated):
    path, _ = snapshot(tmp_path, 20, OWN_OPTIMIZER, annotated=annotated)
    assert growth(capsys, path) == [("my_optimizer.py:7 step", 2 * MIB)]


def test_explain_of_what_grows_points_to_top(tmp_path, capsys):
    path, _ = snapshot(tmp_path, 20, OURS)
    assert main(["explain", path]) == 0
    assert f"Next: stalloc top {path}" in capsys.readouterr().out
