"""Every verb tells the same of one file: peaks, fragmentation, counts and errors agree, whoever recorded it.

Contract: the figures are those of JSON, from the command line, for snapshots that no other test has been fitted to.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from recordings import OUR_OTHERS, each, path_of

from stalloc.cli import main

NAMES = ("qwen05b_h100.json.gz", "dtr_transformer.log.gz", "tiny_transformer.pickle.gz")
OURS = ("gpus.pickle.gz", "streams.pickle.gz", "rank0.pickle.gz", *OUR_OTHERS)
MORE = (
    "cnn_counterfactuals.pickle.gz",
    "ddp_sgd_v100_kineto.json.gz",
    "gnn_llm_3gpu_expandable_oom.pickle.gz",
    "llama3_8b_fsdp4_oom_rank0.pickle.gz",
    "llm_quantize_sqattn.pickle.gz",
    "octree_nca_train.pickle.gz",
    "lm_step_steady.pickle.gz",
    "resnet18_zdevito.html.gz",
    "resnet50_pytorch_blog.pickle.gz",
    "resnet_adam_npu_expandable.pickle.gz",
    "resnet_timeline_hta.json.gz",
    "somas_resnet50.csv.gz",
)


@pytest.mark.parametrize("name", each([*OURS, *NAMES, *MORE], always=NAMES))
def test_all_verbs_agree_on_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(path_of(name))

    def told(*words: str) -> Any:
        capsys.readouterr()
        assert main([*words, "--json", "-"]) == 0, " ".join(words)
        return json.loads(capsys.readouterr().out)

    stats = told("stats", file)["devices"]
    converted = str(tmp_path / "same.trace.npz")
    told("convert", file, converted)
    plan = str(tmp_path / "p.plan.npz")
    planned = told("plan", file, "-o", plan)["devices"]
    assert told("validate", plan, file)["ok"]
    assert told("validate", plan, converted)["ok"]
    explained = told("explain", file, "--at", "peak")["devices"]
    simulated = told("simulate", "--conf", "", file)["devices"]
    held = told("top", file, "--at", "peak")["devices"]
    compared = told("diff", file, converted)["devices"]
    again = told("stats", converted)["devices"]
    rows = zip(stats, planned, explained, simulated, held, compared, again, strict=True)
    for one, plan_of, gap, models, top, diff, same in rows:
        where = f"{name}, device {one['device']}"
        allocated, reserved = one["allocated_peak_bytes"], one["reserved_peak_bytes"]
        assert {key: value for key, value in one.items() if key not in ("file", "source", "notes")} == {
            key: value for key, value in same.items() if key not in ("file", "source", "notes")
        }, where
        assert one["requests"] == plan_of["requests"] == models["requests"], where
        assert one["events"] == models["events"], where
        assert one["lower_bound_bytes"] == plan_of["lower_bound_bytes"] <= plan_of["peak_bytes"], where
        assert models["recorded"]["allocated_peak_bytes"] == allocated, where
        assert models["recorded"]["reserved_peak_bytes"] == reserved, where
        assert top["allocated_bytes"] == allocated, where
        assert diff["first"]["allocated_peak_bytes"] == diff["second"]["allocated_peak_bytes"] == allocated, where
        assert diff["allocated_change_bytes"] == 0, where
        if reserved is not None:
            assert one["fragmentation"] == gap["record_fragmentation"] == models["recorded"]["fragmentation"], where
            assert gap["record_allocated_peak_bytes"] == allocated, where
            assert gap["record_reserved_peak_bytes"] == reserved, where
            assert diff["first"]["reserved_peak_bytes"] == reserved, where
        assert gap["reserved_bytes"] - gap["allocated_bytes"] == sum(gap["causes"].values()), where
        assert sum(entry["held_bytes"] for entry in top["by_size"]) == top["allocated_bytes"], where
        for model in models["results"]:
            peak = model["peak_reserved_bytes"]
            share = 1 - model["peak_allocated_bytes"] / peak if peak else 0.0
            assert model["fragmentation"] == pytest.approx(max(share, 0.0), abs=1e-6), where
