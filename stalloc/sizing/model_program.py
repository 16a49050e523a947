"""Train a language model of transformers, or let it write: the program behind `stalloc dryrun --model`.

  python -m stalloc.sizing.model_program llama-3-8b --batch 4 --seq 4096 --train adamw
  python -m stalloc.sizing.model_program ./config.json --batch 8 --infer

Parameters are random and no weights are loaded. A training step is forward with the model's own loss, backward, and the
optimizer of torch.optim with its defaults. --infer reads a prompt with a cache of keys and values and writes the last
eight of --seq tokens, for one batch after another.
"""

import argparse
import contextlib
import os
import sys
from typing import Any

from stalloc.errors import BadInputError, StallocError
from stalloc.notices import say
from stalloc.printable import printable
from stalloc.sizing.named_models import configuration

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
    """The options of `add_model_arguments` and their values, as words of a command line."""
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
            model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, DTYPES[args.dtype]), trust_remote_code=False
            )
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
