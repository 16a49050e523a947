"""Run a program on a virtual GPU and say what memory it needs, and whether it fits with and without stalloc.

  stalloc dryrun --gpu A100-80GB train.py --batch 8
  stalloc dryrun --memory 24GiB -m package.train

Nothing is computed: allocations are real, kernels do nothing, so a step of a large model takes milliseconds and no GPU.
Small integers and booleans are correct; other values read as zeros, and the report names the lines that decide by them.
A loop that waits for such a value is ended with an error that names its line; --assume says what it reads.

A program often needs less than an allocator takes when memory is plentiful, since cached memory is given up before it
runs out. "Needs" is the least memory with which it completes: its requests, from PyTorch's own history, are replayed on
smaller and smaller devices; for stalloc the result is confirmed by running the program with that much. "Takes" is what
the allocator reserved when memory was plentiful. For a program without PyTorch, which has no such history, both are
what was reserved.

  stalloc dryrun --gpu rtx4090 --find batch=1..512 -- train.py --batch {batch}     (or --find gpu)
  stalloc dryrun --gpu H100 --ranks 8 train.py
  stalloc dryrun --gpu H100 --serve --length 4096 serve.py
  stalloc dryrun --gpu H100 --model llama-3-8b --batch 4 --seq 4096 --train adamw  (or --infer)

What the program writes is discarded, and named in the report; each run begins with the files as they are; --keep-files
writes for real. Experiment trackers are silenced; other network requests are made.

--find looks for the largest value of a parameter that fits, for each allocator, or for the smallest card. --ranks tries
what torchrun would start, each rank by itself. Both do several runs at a time.

--serve is for a program that asks how much is free and takes most of it, as inference servers do. The report shows
weights, activations and cache, in bytes, tokens and requests of --length. With --find it looks for a cache of at least
--tokens; without --tokens it runs and lists every value.
--model needs no script: stalloc's own training loop runs a language model that transformers makes from its
configuration, without weights; docs/dryrun.md says what it does. With --ranks its layers are sharded (FSDP2).

JSON: `gpu`, `memory_bytes`, `headroom_bytes` and their `headroom_source`, and for `native`, `expandable` (PyTorch with
expandable_segments:True) and `stalloc` whether it `fits`, `needed_bytes`, `needed_by` ("replay", "run" or "reserved"),
`taken_bytes` and `allocated_peak_bytes`; `devices` lists them per device; `uncertain` says what a dry run cannot know
(`order_decides`: whether an allocator retries or runs out only if streams are done late), `files` what was discarded,
`sleep` the `phases` of a program that calls stalloc.sleep, and where one `ran_out` of memory on this card,
`node` every byte of the node, by rank and for the machine (--node prints it).
The exit code is 0 if the program fits with stalloc, 1 if it does not, 2 if it fails for another reason than memory.
"""

import argparse
import os
import subprocess
import sys

from stalloc.cli.output import add_json_argument
from stalloc.cli.program import add_program_arguments
from stalloc.cli.shared_options import refuse_typed
from stalloc.device.deciding_lines import VARIABLE as ASSUMED
from stalloc.device.deciding_lines import as_variable, parse_assumption
from stalloc.device.known_gpus import ASSUMED_BYTES, COMPLETION
from stalloc.errors import BadInputError
from stalloc.private import STARTED_ANEW
from stalloc.sizing.model_program import KNOWN, PROGRAM, add_model_arguments, check_model, model_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--headroom",
        default=f"{ASSUMED_BYTES >> 20}MiB",
        metavar="SIZE",
        help="memory set aside for the CUDA context and NCCL, which no allocator counts (default: 512MiB)",
    )
    add(
        "--assume",
        action="append",
        default=[],
        metavar="FILE:LINE=N",
        help="the value that a line of the program reads if the virtual GPU computes none, as at the end of a loop; "
        "may be repeated",
    )
    add(
        "--find",
        metavar="NAME=A..B|gpu",
        help="the largest value that fits, of {NAME} among the program's arguments (batch=1..512, "
        "seq=128..8192:128), or the smallest card",
    )
    add("--ranks", type=int, metavar="N", help="the program is what torchrun starts N times: try each rank")
    add(
        "--node",
        action="store_true",
        help="also print every byte of the node: NCCL, CUDA context, pinned memory, /dev/shm, by rank and by machine",
    )
    add("--rank", default="all", metavar="K", help="with --ranks, only these: 0 or 0,7 (default: all)")
    add("--jobs", type=int, default=0, metavar="N", help="with --find or --ranks, runs at a time")
    add("--steps", type=int, default=0, metavar="N", help="with --find or --ranks, end runs after N optimizer steps")
    add_json_argument(parser)
    add_program_arguments(parser, devices=("virtual",))
    _add_groups(parser)


def _add_groups(parser: argparse.ArgumentParser) -> None:
    of_server = parser.add_argument_group("an inference server")
    add = of_server.add_argument
    add(
        "--serve",
        action="store_true",
        help="the program is a server that takes most of what is free: show what it makes of the card",
    )
    add("--length", type=int, metavar="N", help="with --serve, count requests of N tokens")
    add("--tokens", type=int, metavar="N", help="with --serve, --find looks for a cache of at least N tokens")
    of_model = parser.add_argument_group("a model without a script")
    add = of_model.add_argument
    add(
        "--model",
        metavar="NAME",
        help=f"{', '.join(KNOWN)}; a config.json of transformers or a folder with one; or a name of the Hugging Face "
        "hub, whose configuration is in your cache",
    )
    add("--download", action="store_true", help="fetch the configuration from the hub otherwise (no weights)")
    add_model_arguments(of_model)


def run(args: argparse.Namespace) -> int:
    # replay and libraries, of which --help needs nothing
    if args.serve:
        from stalloc.cli.dryrun_serve import serve as answer
    elif args.find:
        from stalloc.cli.dryrun_find import find as answer
    elif args.ranks is not None:
        from stalloc.cli.dryrun_runs import try_ranks as answer
    else:
        from stalloc.cli.dryrun_runs import find_needs as answer
    from stalloc.sizing.side_by_side import ImportedOtherwiseError

    if not args.serve and (args.length is not None or args.tokens is not None):
        raise BadInputError("--length and --tokens describe a server's cache: give --serve too.")
    if args.serve and args.model is not None:
        raise BadInputError("--serve runs a server, and --model a training loop or a pass of stalloc's: leave one out.")
    if args.find and args.node:
        raise BadInputError(
            "--node is for one run, or for each rank: leave --find out, and give the value that it found."
        )
    os.environ.pop(COMPLETION, None)  # a dry run says by itself when work is done
    _take_model(args)
    before = dict(os.environ)
    if args.assume:
        os.environ[ASSUMED] = as_variable(map(parse_assumption, args.assume))
    try:
        return answer(args)
    except ImportedOtherwiseError as found:
        variables = {STARTED_ANEW: "1", **found.variables}
    finally:
        os.environ.pop(ASSUMED, None)
        if ASSUMED in before:
            os.environ[ASSUMED] = before[ASSUMED]
    # a new Python imports the libraries with the variables that the program sets; those that it unsets are empty
    environment = {name: value for name, value in (before | variables).items() if variables.get(name, value)}
    return subprocess.run([sys.executable, "-m", "stalloc", *args.words], env=environment, check=False).returncode


def _take_model(args: argparse.Namespace) -> None:
    if args.model is None:
        refuse_typed(args, "needs --model NAME", "batch", "seq", "train", "infer", "dtype", "checkpoint", "download")
        return
    if args.module is not None or args.program:
        raise BadInputError("--model runs a program of stalloc's: leave out the script, or --model.")
    if args.find not in (None, "gpu"):
        searched = args.find.partition("=")[0].strip()
        if searched not in ("batch", "seq"):
            raise BadInputError(f"--find is {args.find[:60]!r}: --find with --model takes batch, seq or gpu.")
        setattr(args, searched, f"{{{searched}}}")
    check_model(args.model, args, download=args.download)
    args.module = [PROGRAM, args.model, *model_words(args)]
