"""The recordings that tests read, by name: ours in `recordings/`, and those of strangers where they are there."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

OURS = Path(__file__).parent / "recordings"

#: our snapshots with a history, and how many streams each has
STREAMS = {
    "training": 1, "step": 1, "forward": 1, "optimizer_step": 1, "out_of_memory": 2, "rank0": 1, "rank1": 1,
    "fragmented": 1, "leak": 1, "streams": 7, "gpus": 1, "stale_cache": 1,
}  # fmt: skip
OUR_SNAPSHOTS = tuple(f"{name}.pickle.gz" for name in STREAMS)
OUR_OTHERS = ("profile.json.gz", "memory_timeline.json.gz", "page.html.gz", "lifespans.csv.gz")
STRANGERS_SNAPSHOTS = (
    "cnn_counterfactuals.pickle.gz",
    "gnn_llm_3gpu_expandable_oom.pickle.gz",
    "llama3_8b_fsdp4_oom_rank0.pickle.gz",
    "llama_offload_10streams.pickle.gz",
    "llm_quantize_sqattn.pickle.gz",
    "lm27b_compiled_fwd.pickle.gz",
    "lm27b_ctx128_fullstep.pickle.gz",
    "lm_fb_ctx200.pickle.gz",
    "lm_fwd_ctx200.pickle.gz",
    "lm_step_steady.pickle.gz",
    "octree_nca_train.pickle.gz",
    "resnet50_pytorch_blog.pickle.gz",
    "resnet_adam_npu_expandable.pickle.gz",
    "tiny_transformer.pickle.gz",
)
STRANGERS = (
    *STRANGERS_SNAPSHOTS,
    "ddp_sgd_v100_kineto.json.gz", "dtr_resnet32.log.gz", "dtr_transformer.log.gz", "qwen05b_h100.json.gz",
    "resnet18_zdevito.html.gz", "resnet50_v100_kineto_nw0.json.gz", "resnet_timeline_hta.json.gz",
    "somas_resnet50.csv.gz",
)  # fmt: skip
SNAPSHOTS = OUR_SNAPSHOTS + STRANGERS_SNAPSHOTS
EVERY = OUR_SNAPSHOTS + OUR_OTHERS + STRANGERS

#: one of each origin, and of what a snapshot may have: expandable segments, another vendor; ours have several devices
#: and an error, which those of strangers that have them take ten times as long for
_ALWAYS = (
    "cnn_counterfactuals", "resnet_adam_npu", "tiny_transformer",
    "dtr_resnet32", "qwen05b", "resnet18", "resnet_timeline", "somas",
)  # fmt: skip

ALL = ("",)  #: which every name begins with


def shared_folder(name: str) -> Path | None:
    """A folder of strangers' data below $STALLOC_SHARED, or below `shared` beside the checkout; None if absent."""
    named = os.environ.get("STALLOC_SHARED")
    folder = (Path(named) if named else Path(__file__).parents[1].parent / "shared") / name
    return folder if folder.is_dir() else None


def path_of(name: str) -> Path:
    """Where a recording lies; those of strangers may be named by their folder too (`h100/qwen05b.json.gz`)."""
    ours = OURS / name
    return ours if ours.exists() else (shared_folder("traces") or OURS) / name


def each(rows: Iterable[str | tuple[Any, ...]] = EVERY, always: tuple[str, ...] = _ALWAYS) -> list[object]:
    """Parameters of a test: the recordings that are there, those that are not read always marked as slow.

    A recording is given by its name, or as a row that begins with it.
    """
    values = [(row,) if isinstance(row, str) else row for row in rows]

    def is_slow(name: str) -> bool:
        return not (OURS / name).exists() and not name.startswith(always)

    return [
        pytest.param(*row, marks=[pytest.mark.slow] * is_slow(row[0])) for row in values if path_of(row[0]).exists()
    ]


def counted(name: str) -> dict[int, dict[str, int]]:
    """What torch itself counted while one of our snapshots was recorded, by device."""
    told = json.loads((OURS / f"{name}.counted.json").read_text())
    return {int(device): counts for device, counts in told.items()}
