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
The exit code is 0 if the program fits with stalloc, 1 if it does not or if it fails for another reason.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.dryrun_report import FIGURES, Need, allocator_name, print_needs
from stalloc.cli.native import compare, native_settings, run_apart
from stalloc.cli.output import add_json_argument, wants_text, write_json
from stalloc.cli.program import add_program_arguments, program_command
from stalloc.cli.program_writes import program_files
from stalloc.cli.progress import working
from stalloc.cli.shared_options import refuse_typed
from stalloc.cli.sleep_report import seen_phases
from stalloc.device.completion import VARIABLE, Completion
from stalloc.device.context import ASSUMED_BYTES
from stalloc.device.deciding_lines import VARIABLE as ASSUMED
from stalloc.device.deciding_lines import as_variable, parse_assumption
from stalloc.device.known_gpus import PLENTY, takes_what_is_free
from stalloc.errors import BadInputError, SetupError
from stalloc.figures import human_bytes
from stalloc.sandbox import ProgramFiles, files_from_json
from stalloc.sizing.model_program import PROGRAM, add_model_arguments, check_model, model_words
from stalloc.sizing.named_models import KNOWN
from stalloc.sizing.node import node_memory

Measure = Callable[..., dict[str, Any]]
"""Runs the program on a device of that many bytes; returns what came of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument(
        "--headroom",
        default=f"{ASSUMED_BYTES >> 20}MiB",
        metavar="SIZE",
        help="memory set aside for the CUDA context and NCCL, which no allocator counts (default: 512MiB)",
    )
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="FILE:LINE=N",
        help="the value that a line of the program reads if the virtual GPU computes none, as at the end of a loop; "
        "may be repeated",
    )
    parser.add_argument(
        "--find",
        metavar="NAME=A..B|gpu",
        help="the largest value that fits, of {NAME} among the program's arguments (batch=1..512, "
        "seq=128..8192:128), or the smallest card",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="the program is what torchrun starts N times: try each rank",
    )
    parser.add_argument(
        "--node",
        action="store_true",
        help="also print every byte of the node: NCCL, CUDA context, pinned memory, /dev/shm, by rank and by machine",
    )
    parser.add_argument("--rank", default="all", metavar="K", help="with --ranks, only these: 0 or 0,7 (default: all)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="with --find or --ranks, runs at a time",
    )
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N", help="with --find or --ranks, end each run after N optimizer steps"
    )
    add_json_argument(parser)
    add_program_arguments(parser, devices=("virtual",))
    _add_server_arguments(parser)
    _add_model_arguments(parser)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    of_server = parser.add_argument_group("an inference server")
    of_server.add_argument(
        "--serve",
        action="store_true",
        help="the program is a server that takes most of what is free: show what it makes of the card",
    )
    of_server.add_argument("--length", type=int, metavar="N", help="with --serve, count requests of N tokens")
    of_server.add_argument(
        "--tokens", type=int, metavar="N", help="with --serve, --find looks for a cache of at least N tokens"
    )


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    of_model = parser.add_argument_group("a model without a script")
    of_model.add_argument(
        "--model",
        metavar="NAME",
        help=f"{', '.join(KNOWN)}; a config.json of transformers or a folder with one; or a name of the Hugging Face "
        "hub, whose configuration is in your cache",
    )
    of_model.add_argument(
        "--download", action="store_true", help="fetch the configuration from the hub otherwise (no weights)"
    )
    add_model_arguments(of_model)


def run(args: argparse.Namespace) -> int:
    """Try the program natively and with stalloc; 0 if it fits with stalloc."""
    from stalloc.cli.dryrun_runs import offer_of  # replay, of which --help needs nothing

    _check_together(args)
    os.environ.pop(VARIABLE, None)  # a dry run says by itself when work is done
    _take_model(args)
    if args.find or args.serve or args.ranks is not None:
        with _assuming(args):
            return _in_forks(args)
    command, offer = program_command(args), offer_of(args)
    files = program_files(args, command)
    with working("running the program under its own allocators", in_pipes=True) as tell, _assuming(args):
        options = [*(["--gpu", args.gpu] if args.gpu else []), *(["--keep-files"] if args.keep_files else [])]
        results, uncertain, native = _results(options, offer.program_bytes, command, tell, files)
    node = node_memory(offer.gpu, {None: (native["devices"], native["process"])}, files_bytes=files.all().written_bytes)
    result = {
        **offer.as_json(),
        **{name: _entry(need) for name, need in results.items()},
        "devices": _by_device(results),
        "sleep": results["stalloc"].sleep,
        "uncertain": uncertain,
        "files": files.all().as_json(),
        "node": node.as_json(),
    }
    if wants_text(args):
        print_needs(result, results, offer, command, node, whole_node=args.node)
    write_json(args, result)
    return EXIT_DONE if results["stalloc"].fits else EXIT_CHECK_FAILED


def _check_together(args: argparse.Namespace) -> None:
    """Refuse options that mean nothing without, or beside, one another."""
    if not args.serve and (args.length is not None or args.tokens is not None):
        raise BadInputError("--length and --tokens describe a server's cache: give --serve too.")
    if args.serve and args.model is not None:
        raise BadInputError("--serve runs a server, and --model a training loop or a pass of stalloc's: leave one out.")
    if args.find and args.node:
        raise BadInputError(
            "--node is for one run, or for each rank: leave --find out, and give the value that it found."
        )


def _take_model(args: argparse.Namespace) -> None:
    """Make the program of --model the one that is run."""
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


@contextlib.contextmanager
def _assuming(args: argparse.Namespace) -> Iterator[None]:
    """A block in which programs read what --assume says. Raises BadInputError if it says nothing."""
    before = os.environ.get(ASSUMED)
    if args.assume:
        os.environ[ASSUMED] = as_variable(map(parse_assumption, args.assume))
    try:
        yield
    finally:
        if before is not None:
            os.environ[ASSUMED] = before
        else:
            os.environ.pop(ASSUMED, None)


def _in_forks(args: argparse.Namespace) -> int:
    """Answer with the verbs' parts that run the program many times, each in a fork; the exit code."""
    if args.serve:
        from stalloc.cli.dryrun_serve import serve as answer
    elif args.find:
        from stalloc.cli.dryrun_find import find as answer
    else:
        from stalloc.cli.dryrun_runs import try_ranks as answer
    return answer(args)


def _results(
    options: list[str], offered: int, command: list[str], tell: Callable[[str], None], files: ProgramFiles
) -> tuple[dict[str, Need], dict[str, Any], dict[str, Any]]:
    """The needs by allocator, what the native run could not know, and that run; `options`: which GPU, whose files."""

    def native(size: int, history: Path | None = None, **how: Any) -> dict[str, Any]:
        return _noted(files, _native(options, size, command, history, **how))

    with tempfile.TemporaryDirectory(prefix="stalloc-") as folder:
        history = Path(folder) / "history.pickle"
        measures: dict[str, Measure] = {"native": lambda size, **how: native(size, history, **how)}
        settings = dict(zip(("native", "expandable"), [conf for _, conf, _ in native_settings()], strict=False))
        if "expandable" in settings:
            measures["expandable"] = lambda size, **how: native(size, conf=settings["expandable"], **how)
        measures["stalloc"] = lambda size, **how: _noted(files, _stalloc(options, size, command, **how))
        results: dict[str, Need] = {}
        uncertain: dict[str, Any] = {}
        for number, (name, measure) in enumerate(measures.items(), start=1):
            tell(f"running the program under {allocator_name(name)}, {number} of {len(measures)}")
            tried = _try(name, offered, measure)
            if name == "expandable" and not tried["uses_torch"]:
                continue
            if history.exists():
                tell(f"replaying what it needs under {allocator_name(name)}")
            results[name] = _need(name, tried, _replayed(history, name, settings), offered)
            if name == "native":
                first = tried
                measure_otherwise = partial(native, PLENTY)
                uncertain = _uncertain(tried, results[name], measure_otherwise, settings)
                uncertain["shared_blocks"] = _shared_blocks(tried, uncertain, measure_otherwise)
        if results["stalloc"].needed_by == "replay" and len(results["stalloc"].devices) == 1:
            tell(f"running the program under stalloc with {human_bytes(results['stalloc'].needed_bytes)}")
            results["stalloc"] = _confirmed(results["stalloc"], measures["stalloc"], offered)
        if (shared := uncertain["shared_blocks"]) and shared["taken_bytes"] > offered:
            tell("running the program with work done later")
            uncertain["order_decides"] = [
                told
                for name, need in results.items()
                if need.fits and (told := _what_order_decides(name, need, measures[name], offered)) is not None
            ]
    return results, uncertain, first


def _noted(files: ProgramFiles, result: dict[str, Any]) -> dict[str, Any]:
    """A result, after noting in `files` what became of the program's files."""
    if "files" in result:
        files.note(files_from_json(result["files"]))
    return result


def _confirmed(need: Need, measure: Callable[[int], dict[str, Any]], offered: int) -> Need:
    """What stalloc needs, found by running: the replay is exact for PyTorch's allocator, and may be a page off here."""
    least, page = need.needed_bytes, 2 << 20
    for size in (least, least + page, least + max(2 * page, least // 100)):
        if size >= need.taken_bytes:
            break
        if measure(size)["exit_code"] == 0:
            return _with_need(need, size, "run")
    return _with_need(need, min(need.taken_bytes, offered) if need.fits else need.taken_bytes, "run")


def _with_need(need: Need, size_bytes: int, needed_by: str) -> Need:
    devices = {index: {**figures, "needed_bytes": size_bytes} for index, figures in need.devices.items()}
    return replace(need, needed_bytes=size_bytes, needed_by=needed_by, devices=devices)


def _uncertain(
    tried: dict[str, Any], need: Need, measure: Callable[..., dict[str, Any]], settings: dict[str, str]
) -> dict[str, Any]:
    """What a native run could not know, with its figures for the least and the most that cuDNN may ask for."""
    uncertain: dict[str, Any] = tried.get("virtual", {})
    if takes_what_is_free(PLENTY, need.taken_bytes):
        uncertain["taking_what_is_free"] = need.taken_bytes
    convolutions = uncertain.get("convolutions", {})
    if convolutions.get("unknown_bytes"):
        seen = [{name: getattr(need, name) for name in FIGURES}]
        with tempfile.TemporaryDirectory(prefix="stalloc-") as folder:
            for which in ("least", "most"):
                file = Path(folder) / f"{which}.pickle"
                one = measure(file, workspaces=which)
                other = _need("native", one | {"fits": True}, _replayed(file, "native", settings), PLENTY)
                seen.append({name: getattr(other, name) for name in FIGURES})
        allocated = [one["allocated_peak_bytes"] for one in seen]
        convolutions["allocated_peak_bytes"] = [min(allocated), max(allocated)]
        # tries, and no range: in how many pieces memory is reserved may differ more with what lies between them
        convolutions["taken_bytes_tried"] = sorted({one["taken_bytes"] for one in seen})
        # the most is not needed: where memory is short PyTorch turns to other engines of cuDNN
        convolutions["needed_bytes_tried"] = sorted({one["needed_bytes"] for one in seen[:2]})
    return uncertain


def _shared_blocks(tried: dict[str, Any], uncertain: dict[str, Any], measure: Measure) -> dict[str, Any] | None:
    """What blocks used on several streams (record_stream) take if their streams are not done with them at once."""
    if not uncertain.pop("shares_blocks", False):
        return None
    from stalloc.sizing.delayed_events import shared_blocks

    return shared_blocks(tried["devices"], lambda how: measure(completion=how)["devices"])


def _what_order_decides(name: str, need: Need, measure: Measure, offered: int) -> dict[str, Any] | None:
    from stalloc.sizing.delayed_events import Outcome, outcome_of, what_order_decides

    def outcome(how: Completion) -> Outcome:
        if how == "at-once" and need.taken_bytes <= offered:
            return Outcome(fits=True, num_retries=0)
        result = measure(offered, completion=how)
        _refuse_failure(name, result)
        return outcome_of(result["exit_code"] == 0, result["devices"])

    return what_order_decides(name, outcome)


def _try(name: str, offered: int, measure: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Run under one allocator with plenty of memory and, if that takes more than is offered, with what is offered."""
    tried = measure(PLENTY)
    if tried["exit_code"] == 0:
        tried["fits"] = all(device["reserved_peak_bytes"] <= offered for device in tried["devices"])
        if tried["fits"]:
            return tried | {"sleep": seen_phases(tried, tried)}
    _refuse_failure(name, tried)
    again = measure(offered)
    _refuse_failure(name, again)
    return tried | {"fits": again["exit_code"] == 0, "sleep": seen_phases(tried, again)}


def _refuse_failure(name: str, tried: dict[str, Any]) -> None:
    if tried["exit_code"] != 0 and not tried["out_of_memory"]:
        raise SetupError(
            f"the program failed with code {tried['exit_code']} ({name}), not for lack of memory: see its output above."
        )


def _native(
    options: list[str],
    offered: int,
    command: list[str],
    history: Path | None = None,
    *,
    conf: str | None = None,
    workspaces: str = "likely",
    completion: Completion = "at-once",
) -> dict[str, Any]:
    wanted = ["--history", str(history)] if history is not None and offered == PLENTY else []
    wanted += ["--completion", completion]
    all_options = [*wanted, "--workspaces", workspaces, "--device", "virtual", *options, "--memory", f"{offered}B"]
    return compare(all_options, command, quiet=True, conf=conf)


def _stalloc(
    options: list[str], offered: int, command: list[str], *, completion: Completion = "at-once"
) -> dict[str, Any]:
    wanted = ["--discard-files", "--completion", completion]
    all_options = [*wanted, "--device", "virtual", *options, "--memory", f"{offered}B"]
    result = run_apart(["-m", "stalloc", "run", "--json"], [*all_options, *command], quiet=True)
    for device in result["devices"]:
        device["reserved_peak_bytes"] = device["run_reserved_peak_bytes"]
        device["allocated_peak_bytes"] = device["run_allocated_peak_bytes"]
    result["out_of_memory"] = any(device["out_of_memory_errors"] for device in result["devices"])
    result["out_of_memory"] |= result["sleep"] is not None and result["sleep"]["ran_out"] is not None
    if result["exit_code"] != 0 and not result["out_of_memory"]:
        sys.stderr.write(result["output"])
    return result


def _replayed(history: Path, name: str, settings: dict[str, str]) -> dict[int, int]:
    """The least memory of each device, by the replay of the history; empty without one."""
    if not history.exists():
        return {}
    from stalloc.replay.least_memory import least_memory
    from stalloc.replay.simulation import Candidate
    from stalloc.trace import load_traces

    candidate = Candidate("stalloc") if name == "stalloc" else Candidate("torch", settings[name])
    try:
        return {trace.device: least_memory(trace, candidate) for trace in load_traces(history)}
    except BadInputError:
        return {}  # settings that the model does not know, or a history that is not whole


def _need(name: str, tried: dict[str, Any], replayed: dict[int, int], offered: int) -> Need:
    """What one allocator was seen to do, the runs before the replay."""
    devices, sleep = {}, tried.get("sleep")
    phases = sleep["phases"] if sleep is not None and len(tried["devices"]) == 1 else []
    awake = max((one["allocated_peak_bytes"] for one in phases), default=0)
    for device in tried["devices"]:
        taken = device["reserved_peak_bytes"]
        # a replay knows of no sleep
        least = awake or max(replayed.get(device["device"], taken), device["allocated_peak_bytes"])
        least = min(least, offered, taken) if tried["fits"] else min(least, taken)
        devices[device["device"]] = {
            "needed_bytes": least,
            "taken_bytes": taken,
            "allocated_peak_bytes": device["allocated_peak_bytes"],
        }
    largest = {key: max((entry[key] for entry in devices.values()), default=0) for key in FIGURES}
    by = "replay" if replayed else "reserved"
    uses_torch = bool(tried.get("uses_torch", True))
    return Need(fits=tried["fits"], needed_by=by, uses_torch=uses_torch, devices=devices, sleep=sleep, **largest)


def _entry(need: Need) -> dict[str, Any]:
    return {key: value for key, value in asdict(need).items() if key not in ("devices", "uses_torch", "sleep")}


def _by_device(results: dict[str, Need]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for name, need in results.items():
        for index, device in need.devices.items():
            found.setdefault(index, {"device": index})[name] = device
    return [found[index] for index in sorted(found)]
