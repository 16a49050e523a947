"""The PyTorch engine of lmdeploy, of a Llama of 8B parameters: cache, graphs unless --eager, and four tokens.

It cannot do without a file of weights, so it gets one that is a hole.
"""

import json
import os
import struct
import sys
import tempfile
from pathlib import Path

from llama_sizes import MODEL

# its check compares a sum that a kernel of Triton computes
os.environ.update(HF_HUB_OFFLINE="1", LMDEPLOY_ENABLE_CHECK_ENV="0")

from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline
from tokenizers import Tokenizer, models

WIDTH, INNER, LAYERS, KEYS, WORDS = 4096, 14336, 32, 1024, 128256
LAYER = {
    "input_layernorm": [WIDTH],
    "post_attention_layernorm": [WIDTH],
    "self_attn.q_proj": [WIDTH, WIDTH],
    "self_attn.k_proj": [KEYS, WIDTH],
    "self_attn.v_proj": [KEYS, WIDTH],
    "self_attn.o_proj": [WIDTH, WIDTH],
    "mlp.gate_proj": [INNER, WIDTH],
    "mlp.up_proj": [INNER, WIDTH],
    "mlp.down_proj": [WIDTH, INNER],
}


def write_weights(file: Path) -> None:
    """A safetensors file of zeros, as a hole."""
    shapes = {"model.embed_tokens": [WORDS, WIDTH], "model.norm": [WIDTH], "lm_head": [WORDS, WIDTH]}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in LAYER.items()}
    entries, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * shape[-1] ** (len(shape) - 1)
        entries[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with file.open("wb") as written:
        written.write(struct.pack("<Q", len(header)) + header)
        written.truncate(8 + len(header) + end)


with tempfile.TemporaryDirectory() as folder:
    model = MODEL | {"rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
    (Path(folder) / "config.json").write_text(json.dumps(model))
    write_weights(Path(folder) / "model.safetensors")
    Tokenizer(models.WordLevel({f"w{one}": one for one in range(9)}, "w0")).save(f"{folder}/tokenizer.json")
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    engine = pipeline(folder, backend_config=PytorchEngineConfig(eager_mode="--eager" in sys.argv))
    settings = GenerationConfig(max_new_tokens=4, ignore_eos=True)
    output = engine(["w1 w2 w3 w4"], gen_config=settings, do_preprocess=False)
    engine.close()
assert output[0].generate_token_len == 4
