"""SGLang of a Llama of 8B parameters without weights: cache, graphs unless --eager, and four tokens.

Kernels that nvcc would compile as they are first used (SGLang's and FlashInfer's own; those of the wheel are there) are
replaced by functions that do nothing: they are given their outputs. The scheduler, a process of its own, runs the top
of this file too.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from llama_sizes import MODEL

os.environ["HF_HUB_OFFLINE"] = "1"

import flashinfer.jit.core
import sglang.jit_kernel.utils


class Kernels:
    def __getattr__(self, name):
        return lambda *_: None


flashinfer.jit.core.JitSpec.build_and_load = lambda _: Kernels()
sglang.jit_kernel.utils.load_jit = lambda *_, **__: Kernels()

import sglang

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL | {"torch_dtype": "bfloat16"}))
        settings = {"load_format": "dummy", "skip_tokenizer_init": True, "disable_cuda_graph": "--eager" in sys.argv}
        engine = sglang.Engine(model_path=folder, log_level="info", **settings)
        output = engine.generate(input_ids=[1, 2, 3, 4], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
        engine.shutdown()
    assert len(output["output_ids"]) == 4
