"""Train a language model of transformers, or let it write: the program behind `stalloc dryrun --model`.

  python -m stalloc.sizing.model_program llama-3-8b --batch 4 --seq 4096 --train adamw
  python -m stalloc.sizing.model_program ./config.json --batch 8 --infer

Parameters are random and no weights are loaded. A training step is forward with the model's own loss, backward, and the
optimizer of torch.optim with its defaults. --infer reads a prompt with a cache of keys and values and writes the last
eight of --seq tokens, for one batch after another.
"""

import argparse
import contextlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stalloc.errors import BadInputError, SetupError, StallocError
from stalloc.inputs import read_input
from stalloc.notices import say
from stalloc.printable import printable

PROGRAM = "stalloc.sizing.model_program"  #: what python -m runs
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adamw-fused": ("AdamW", {"fused": True}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "adafactor": ("Adafactor", {}),
}
"""The classes of torch.optim that --train takes, and what they are given."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "mixed": "float32"}
"""The type of parameters, gradients and optimizer state; with "mixed" autocast computes in bfloat16."""
NUM_STEPS = 8  #: steps or requests of a run: stalloc watches the first ones, then runs on its plan
_NUM_WRITTEN = 8  # tokens after a prompt: each asks for what the ones before it did, with a longer cache


def _like_llama(
    kind: str, width: int, inner: int, layers: int, heads: int, kv_heads: int, words: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": words,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **more,
    }


KNOWN: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_positions": 1024},
    "gpt2-xl": {"model_type": "gpt2", "n_positions": 1024, "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "llama-2-7b": _like_llama("llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-3-8b": _like_llama("llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3-70b": _like_llama("llama", 8192, 28672, 80, 64, 8, 128256, 8192),
    "llama-3.2-1b": _like_llama("llama", 2048, 8192, 16, 32, 8, 128256, 131072, tie_word_embeddings=True),
    "mistral-7b": _like_llama("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None),
    "qwen2.5-0.5b": _like_llama("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, tie_word_embeddings=True),
    "qwen2.5-7b": _like_llama("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "qwen3-8b": _like_llama("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
}
"""Published configurations, as far as they decide sizes; what is left out is transformers' default."""
_CHOICES = f"give a config.json, a folder with one, or one of {', '.join(KNOWN)}"


def configuration(name: str, *, download: bool = False) -> dict[str, Any]:
    """What transformers' AutoConfig is made of, `model_type` among it. `name` is one of KNOWN, a config.json or a
    folder with one, or a model of the Hugging Face hub: its configuration is read from the user's cache, or fetched if
    `download` is set. Raises BadInputError where there is none, and SetupError where transformers is missing. No code
    that comes with a model is run."""
    if find_spec("transformers") is None:
        raise SetupError("--model needs transformers: pip install transformers.")
    if name.lower() in KNOWN:
        return dict(KNOWN[name.lower()])
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise _no_model(f"{printable(name)} is a folder without a config.json")
    elif not path.is_file():
        path = _of_hub(name, download)
    try:
        found = json.loads(read_input(path, "a model's configuration"))
    except ValueError as error:
        raise _no_model(f"{printable(str(path))} is not JSON ({printable(str(error))})") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise _no_model(f"{printable(str(path))} has no model_type, so it is no configuration of transformers")
    return found


def _of_hub(name: str, download: bool) -> Path:
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise _no_model(f"there is no model {printable(name)!r}")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
        if isinstance(found, str) and os.path.isfile(found):
            return Path(found)
        if not download:
            raise BadInputError(
                f"the configuration of {printable(name)} is not in the cache of huggingface_hub: add --download, which "
                f"fetches it (no weights), or {_CHOICES}."
            )
        return Path(hf_hub_download(name, "config.json"))
    except HFValidationError as error:
        raise _no_model(f"{printable(name)!r} is no name of the hub ({printable(str(error))})") from None
    except (OSError, RuntimeError) as error:  # what requests and the hub raise: no such model, no access, no network
        reason = printable(str(error).strip().partition("\n")[0])
        raise _no_model(f"the configuration of {printable(name)} cannot be fetched ({reason})") from None


def _no_model(why: str) -> BadInputError:
    return BadInputError(f"{why}: {_CHOICES}.")


def add_model_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options that `stalloc dryrun --model` has too; numbers are text, because --find searches {batch}."""
    parser.add_argument("--batch", default="1", metavar="N", help="sequences in a batch (default: 1)")
    parser.add_argument("--seq", default="1024", metavar="N", help="tokens in a sequence (default: 1024)")
    parser.add_argument("--train", choices=OPTIMIZERS, help="train with this optimizer of torch.optim (default: adamw)")
    parser.add_argument("--infer", action="store_true", help="read prompts and write after them instead of training")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="of parameters, gradients and optimizer state (default: bf16); mixed: fp32, computing in bf16",
    )
    parser.add_argument(
        "--checkpoint",
        action="store_true",
        help="recompute each layer's activations in backward (gradient checkpointing)",
    )


def model_words(args: argparse.Namespace) -> list[str]:
    words = ["--batch", args.batch, "--seq", args.seq]
    words += ["--infer"] if args.infer else ["--train", args.train or "adamw"]
    return [*words, *(["--checkpoint"] if args.checkpoint else []), "--dtype", args.dtype]


def check_model(name: str, args: argparse.Namespace, *, download: bool = False) -> dict[str, Any]:
    """The model's configuration, once the options suit it. Raises BadInputError if they do not."""
    found = configuration(name, download=download)
    if args.infer and (args.train or args.checkpoint):
        raise BadInputError("--infer is without --train and --checkpoint: nothing is kept for backward.")
    for option in ("batch", "seq"):
        text = getattr(args, option)
        if text != f"{{{option}}}" and not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text)):
            raise BadInputError(f"--{option} is {text[:40]!r}: give a number from 1.")
    positions = found.get("max_position_embeddings", found.get("n_positions"))
    if isinstance(positions, int) and args.seq.isdigit() and int(args.seq) > positions:
        raise BadInputError(
            f"{printable(name)} is made for {positions:,} tokens in a sequence, not {int(args.seq):,}: give a shorter "
            "--seq, or a copy of its configuration that has more positions."
        )
    return found


def main() -> int:
    """Run the program; 2 for a model or options that cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m stalloc.sizing.model_program",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a name that stalloc knows, a config.json, a folder with one, or a hub's name")
    add_model_arguments(parser)
    args = parser.parse_args()
    try:
        _run(args, check_model(args.model, args))
    except StallocError as error:
        say(str(error))
        return 2
    return 0


def _run(args: argparse.Namespace, found: dict[str, Any]) -> None:
    import torch

    batch, seq = int(args.batch), int(args.seq)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if num_ranks > 1:
        torch.distributed.init_process_group("nccl")
    model = _model(found, args, device, sharded=num_ranks > 1)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{printable(args.model)}: {num_parameters:,} parameters, {batch} x {seq} tokens", flush=True)
    tokens = torch.zeros(batch, seq, dtype=torch.long, device=device)
    mixed = torch.autocast("cuda", dtype=torch.bfloat16) if args.dtype == "mixed" else contextlib.nullcontext()
    if args.infer:
        model.eval()
        model.generation_config.eos_token_id = None  # the end of a text would be a value that decides
        new = min(_NUM_WRITTEN, seq - 1) or 1
        prompt = tokens[:, : max(1, seq - new)]
        everywhere = torch.ones_like(prompt)
        for _ in range(NUM_STEPS):
            with mixed:
                model.generate(prompt, attention_mask=everywhere, do_sample=False, max_new_tokens=new, pad_token_id=0)
        return
    model.train()
    kind, given = OPTIMIZERS[args.train or "adamw"]
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-5, **given)
    for _ in range(NUM_STEPS):
        with mixed:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _model(found: dict[str, Any], args: argparse.Namespace, device: Any, *, sharded: bool) -> Any:
    """The model with random parameters on the device; with `sharded` a rank's part of each (FSDP2, layer by layer)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(**found)
        with torch.device("meta" if sharded else device):
            dtype = getattr(torch, DTYPES[args.dtype])
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers raises nearly anything for what it does not know
        reason = printable(str(error).strip().partition("\n")[0])
        raise BadInputError(
            f"transformers makes no language model of {printable(args.model)} ({reason}): give one that predicts the "
            "next token, or dry-run a script of yours."
        ) from error
    if args.checkpoint:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its name from 5 on
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in _layers(model):
            fully_shard(layer)
        fully_shard(model)
        model.to_empty(device=device)
        model.tie_weights()
    return model


def _layers(model: Any) -> list[Any]:
    """The layers that repeat: the longest list of modules of one type."""
    import torch

    lists = [list(one) for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    return max((one for one in lists if len({type(layer) for layer in one}) == 1), key=len, default=[])


if __name__ == "__main__":
    sys.exit(main())
