"""nano-vllm of a Qwen3 of 0.6B parameters without weights: warm-up, cache, graphs, a prefill and a decode.

flash_attn, which nvcc would have to compile, is replaced by functions that make the outputs that it makes.
"""

import json
import sys
import tempfile
import types
from pathlib import Path

import torch

attention = types.ModuleType("flash_attn")
attention.flash_attn_varlen_func = lambda q, *_, **__: torch.empty_like(q)
attention.flash_attn_with_kvcache = lambda q, *_, **__: torch.empty_like(q)
sys.modules["flash_attn"] = attention

import nanovllm.engine.model_runner as runner
from nanovllm.config import Config
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

MODEL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
MODEL |= {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
MODEL |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
MODEL |= {"tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False}
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.json").write_text(json.dumps(MODEL))
    runner.load_model = lambda model, path: None
    config = Config(folder)
    config.hf_config.rope_scaling = None
    made = runner.ModelRunner(config, 0, [])
sequence = Sequence([1, 2, 3, 4], SamplingParams(max_tokens=4, ignore_eos=True))
sequence.block_table = [0]
made.run([sequence], True)
sequence.append_token(5)
made.run([sequence], False)
