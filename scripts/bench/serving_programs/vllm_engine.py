"""vLLM without weights: profile, cache, graphs unless --eager, and four tokens.

vllm_engine.py [--eager] [--model NAME] [SETTINGS]     NAME: in results/vllm-logs.json, else a Llama of 8B parameters;
                                                       SETTINGS: arguments of vllm.LLM as JSON
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from llama_sizes import MODEL

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

from vllm import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--eager", action="store_true")
parser.add_argument("--model")
parser.add_argument("settings", nargs="?", default="{}", type=json.loads)
args = parser.parse_args()
llama = MODEL | {"dtype": "bfloat16"}
if args.model:
    logs = json.loads((Path(__file__).parents[1] / "results" / "vllm-logs.json").read_text())["logs"]
    model = next(log["model"] for log in logs if log["name"] == args.model)
    llama = {"dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2} | model
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.json").write_text(json.dumps(llama))
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": args.eager}
    engine = LLM(model=folder, disable_log_stats=True, **settings, **args.settings)
    sampling = SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": [1, 2, 3, 4]}], sampling)
assert len(outputs[0].outputs[0].token_ids) == 4
