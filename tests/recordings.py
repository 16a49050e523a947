"""The recordings of real programs that tests read, by name, and which of them are read always."""

from collections.abc import Iterable

import pytest

SNAPSHOTS = (
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
OTHERS = (
    "ddp_sgd_v100_kineto.json.gz", "dtr_resnet32.log.gz", "dtr_transformer.log.gz", "qwen05b_h100.json.gz",
    "resnet18_zdevito.html.gz", "resnet50_v100_kineto_nw0.json.gz", "resnet_timeline_hta.json.gz",
    "somas_resnet50.csv.gz",
)  # fmt: skip
EVERY = SNAPSHOTS + OTHERS

#: one of each origin, and of what a snapshot may have: several devices, expandable segments, an error, another vendor
_ALWAYS = (
    "cnn_counterfactuals", "gnn_llm", "llama3_8b", "resnet_adam_npu", "tiny_transformer",
    "dtr_resnet32", "qwen05b", "resnet18", "resnet_timeline", "somas",
)  # fmt: skip


def each(names: Iterable[str] = EVERY) -> list[object]:
    """Parameters of a test: the recordings, those that are not read always marked as slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (not name.startswith(_ALWAYS))) for name in names]
