"""`stalloc dryrun --serve`: a program that takes most of what is free, on a card of its own size.

What takes all that is left has no size of its own: it is run on the card as it is, and what it divides the card into is
shown, with how many tokens its cache holds.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from stalloc.analysis.server_log import DRIVER_GROWTH_BYTES, ServerLog, read_server_log
from stalloc.cli.dryrun_runs import (
    Offer,
    Runs,
    cards_to_try,
    offer_of,
    ran_out_entry,
    with_memory,
)
from stalloc.cli.output import check_numbers, command_text, present
from stalloc.cli.program import program_command
from stalloc.cli.sizing_report import last_lines, print_sleep, ran_out_text
from stalloc.cli.tables import print_items, print_lines, print_prose, print_table
from stalloc.device import DEFAULT_GPU, VirtualGPU
from stalloc.device.known_gpus import KNOWN_GPUS, shown_with_memory
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.printable import printable
from stalloc.sizes import MIB
from stalloc.sizing.searches import Parameter, last_enough
from stalloc.sizing.served import Served, read_served
from stalloc.sizing.side_by_side import Asked, RunSeen, RunWork
from stalloc.trace.sites import UNKNOWN

#: vLLM is run in this process, where it is seen, and without what nvcc would have to compile
_OF_VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
#: lmdeploy would end, as the sum that it has a kernel of Triton compute is not there
_VARIABLES = _OF_VLLM | {"LMDEPLOY_ENABLE_CHECK_ENV": "0"}
_LARGER = 16  # a part of the card by which the second one is larger: see sizing/served.py
_MOST_VALUES = 64  # that are run one by one
_MOST_SITES = 3  # of the cache, shown
#: MiB for each graph with its part of the pool, in seven public logs of vLLM with 18 to 86 graphs (docs/serving.md)
_GRAPH_MIB = (2, 29)


def serve(args: argparse.Namespace) -> int:
    """Run it; 0 if it starts, and with --tokens if its cache holds so many."""
    check_numbers(args, 1, "length", "tokens")
    if args.ranks is not None:
        raise BadInputError("--serve runs on one GPU: leave --ranks out.")
    if args.node:
        raise BadInputError("--serve shows what the device holds: leave --node out, or try it without --serve.")
    if args.find == "gpu":
        return _find_card(args)
    if args.find:
        return _find_value(args)
    offer, command = offer_of(args), program_command(args)
    runs = Runs(args, offer.gpu)
    result = {**offer.as_json(), **_measured(runs, offer, command), "files": runs.files.all().as_json()}
    present(args, result, _print, result, offer, args.length, command)
    enough = args.tokens is None or (result["tokens"] or 0) >= args.tokens
    return 0 if result["starts"] and enough else 1


def _asked(offer: Offer, command: list[str], how: str, *, record: bool = False) -> Asked:
    gpu = dataclasses.replace(offer.gpu, context_bytes=offer.headroom_bytes)
    variables = {name: os.environ.get(name, value) for name, value in _VARIABLES.items()}
    work = RunWork(gpu=gpu, watch_server=True, keep_history=record, name_holders=True, variables=variables)
    return Asked(command=command, work=work, name=how)


def _measured(runs: Runs, offer: Offer, command: list[str]) -> dict[str, Any]:
    larger_bytes = offer.gpu.total_bytes + offer.gpu.total_bytes // _LARGER
    larger = Offer(with_memory(offer.gpu, larger_bytes), offer.headroom_bytes)
    names = {offer.gpu.name: offer, f"with {human_bytes(larger_bytes)}": larger}
    seen, seen_larger = runs([_asked(one, command, name, record=True) for name, one in names.items()])
    log = _log(seen)
    told = {**_seen_entry(seen), "by": "log" if log is not None else None}
    told |= dict.fromkeys((one.name for one in dataclasses.fields(Served)), None)
    # weights, activations and cache are those of the run if it shows them, else of the program's own log
    if seen.traces and seen_larger.traces and (served := read_served(seen.traces[0], seen_larger.traces[0])):
        told |= {"by": "run", **dataclasses.asdict(served)}
    elif log is not None:
        told |= {name: getattr(log, name) for name in ("weights_bytes", "activation_bytes", "cache_bytes")}
    return told | {"tokens_least": _least_tokens(told, log), "uncertain": seen.findings}


def _log(seen: RunSeen) -> ServerLog | None:
    return read_server_log((seen.server or {}).get("output", ""))


def _seen_entry(seen: RunSeen) -> dict[str, Any]:
    """What one run showed; no tokens where the engine is not known."""
    server, log = seen.server or {}, _log(seen)
    tokens = server.get("tokens")
    if tokens is None and log is not None:
        tokens = log.tokens
    return {
        "starts": seen.completes,
        "tokens": tokens if seen.completes else None,
        "reserved_peak_bytes": max((one["reserved_peak_bytes"] for one in seen.devices), default=0),
        **{name: server.get(name, 0) for name in ("num_graphs", "pinned_bytes")},
        "graph_bytes": server.get("graph_bytes") or (log.graphs_bytes or 0 if log is not None else 0),
        "engine": log.engine if log is not None else None,
        "ran_out": ran_out_entry(seen),
        "sleep": {**server["sleep"], "is_given_plenty": False} if server.get("sleep") else None,
    }


def _least_tokens(told: dict[str, Any], log: ServerLog | None) -> int | None:
    """The tokens left if the cache loses what no run here can see, taken as the most that public logs show."""
    tokens, cache = told["tokens"], told["cache_bytes"]
    if not tokens or not cache:
        return None
    unseen = DRIVER_GROWTH_BYTES[1]
    if log is not None and log.reckons_graphs:
        unseen += max(_GRAPH_MIB[1] * MIB * told["num_graphs"] - told["graph_bytes"], 0)
    return max(int(tokens * (1 - unseen / cache)), 0)


def _print(console: Console, result: dict[str, Any], offer: Offer, length: int | None, command: list[str]) -> None:
    name = shown_with_memory("virtual", printable(offer.gpu.name), offer.gpu.total_bytes)
    console.print(f"{name}: {human_bytes(offer.program_bytes)} free as the program begins")
    if not result["starts"]:
        why = f": {ran_out_text(result['ran_out'])}" if result["ran_out"] else ""
        slept = result["sleep"] and f"it runs out of memory after `{printable(result['sleep']['ended_in'])}`"
        if slept is None or result["sleep"]["ran_out"] is None:  # else the phases are followed by more than that
            print_prose(console, f"{slept or 'it does not start, for lack of memory'}{why}", indent="  ")
    else:
        _print_parts(console, result, length)
    if result["sleep"] is not None:
        print_sleep(console, result["sleep"], "context included", human_bytes(result["memory_bytes"]))
    if result["starts"]:
        print_lines(console, [*_notes(result), *_unseen(result, offer), *last_lines(result)])
    if result["starts"] and result["tokens"]:
        words = command_text(*command)
        console.print(f"next: stalloc dryrun --serve --find gpu --tokens {result['tokens']} {words}")
    else:
        console.print("next: the same with a larger --gpu, or other settings of the engine")


def _print_parts(console: Console, result: dict[str, Any], length: int | None) -> None:
    graphs = f"reserved in the pools of {result['num_graphs']} graphs" if result["num_graphs"] else ""
    rows = [
        ("weights", result["weights_bytes"], "and what else is live as the cache is made"),
        ("activation peak", result["activation_bytes"], _place(result["activation_at"], "above the weights, before")),
        ("cache", result["cache_bytes"], _cache_text(result, length)),
        ("CUDA graphs", result["graph_bytes"] or None, graphs),
        ("while serving", result["serving_bytes"], _place(result["serving_at"], "above weights and cache")),
        ("reserved", result["reserved_peak_bytes"] or None, "by PyTorch, at the most"),
    ]
    print_items(console, [(name, human_bytes(size), text) for name, size, text in rows if size is not None])


def _place(place: str | None, otherwise: str) -> str:
    return f"{otherwise}: {printable(place)}" if place and place != UNKNOWN else otherwise


def _cache_text(result: dict[str, Any], length: int | None) -> str:
    tokens, at = result["tokens"], result["cache_at"] or []
    if tokens is None:
        return "what grows with the card"
    each = f", {result['cache_bytes'] / tokens / 1024:.1f} KiB each" if result["cache_bytes"] and len(at) < 2 else ""
    fits = f": {tokens // length:,} requests of {length:,} tokens" if length else ""
    return f"{tokens:,} tokens{each}{fits}"


def _notes(result: dict[str, Any]) -> list[str]:
    at = [f"{human_bytes(size)} by {printable(place)}" for place, size in (result["cache_at"] or [])[:_MOST_SITES]]
    lines = [f"the cache and what else grows with the card: {', '.join(at)}"] if at else []
    if result["by"] == "log":
        lines.append(
            "these are the figures of the program's own log: the engine works in a process of its own, or takes the "
            "same on a larger card, so its requests were not looked at"
        )
    elif result["by"] is None:
        lines.append(
            "no cache was found: the program takes the same on a larger card, or its requests were not made by PyTorch "
            "in this process"
        )
    if result["by"] and result["tokens"] is None:
        lines.append(
            "how many tokens the cache holds is not known of this engine: a line `GPU KV cache size: N tokens` that "
            "the program prints says it"
        )
    if result["engine"] == "vLLM":
        words = " ".join(f"{name}={os.environ.get(name, value)}" for name, value in _OF_VLLM.items())
        lines.append(f"run with {words}, so that the engine is in this process and nothing is compiled by nvcc")
    return lines


def _unseen(result: dict[str, Any], offer: Offer) -> list[str]:
    lines = []
    if offer.headroom_bytes:
        kept = f"{human_bytes(offer.headroom_bytes)} are taken off what is free ({offer.headroom_source})"
        lines.append(f"not seen here: the CUDA context, for which {kept}")
    least, most = (human_bytes(one) for one in DRIVER_GROWTH_BYTES)
    text = f"not seen here: what the driver takes while an engine measures, {least} to {most} in sixteen public logs"
    if result["tokens_least"] is not None:
        text += f"; with that, the cache holds {result['tokens_least']:,} to {result['tokens']:,} tokens"
    lines.append(text)
    if result["num_graphs"]:
        num = result["num_graphs"]
        ends = [human_bytes(max(each * MIB * num, result["graph_bytes"])) for each in _GRAPH_MIB]
        lines.append(
            f"not seen here: the driver's part of {num} CUDA graphs; with their pools {_GRAPH_MIB[0]} to "
            f"{_GRAPH_MIB[1]} MiB each in seven public logs, {ends[0]} to {ends[1]}"
        )
    lines.append("not seen here: NCCL's buffers, of which one GPU alone has none or few")
    if result["pinned_bytes"]:
        pinned = human_bytes(result["pinned_bytes"])
        lines.append(f"on the host: {pinned} pinned, as PyTorch rounds it to powers of two")
    return lines


def _find_value(args: argparse.Namespace) -> int:
    """The largest value with enough tokens, or what each value gives; 0 if there is one that starts with enough."""
    command, parameter, offer = program_command(args), Parameter.parse(args.find), offer_of(args)
    parameter.check_in(command)
    values = list(parameter.values)
    if args.tokens is None and len(values) > _MOST_VALUES:
        raise BadInputError(
            f"--find names {len(values):,} values, which would all be run: give --tokens N for the largest with so "
            f"many, or a step that leaves {_MOST_VALUES}."
        )
    asked = [_asked(offer, parameter.filled(command, value), parameter.label(value)) for value in values]
    runs, seen, answer = _looked(args, offer.gpu, asked)
    result = {
        **offer.as_json(),
        "parameter": parameter.name,
        "wanted_tokens": args.tokens,
        "largest": values[answer] if answer >= 0 else None,
        "values": [{"value": values[at], **_seen_entry(one)} for at, one in sorted(seen.items())],
        "files": runs.files.all().as_json(),
    }
    found, words = "no value gives a cache", []
    if answer >= 0:
        found = f"{parameter.label(values[answer])} is the largest"
        words = [*(["--gpu", args.gpu] if args.gpu else []), *parameter.filled(command, values[answer])]
    rows = [(str(one["value"]), one) for one in result["values"]]
    present(args, result, _print_found, args, [offer.title()], (parameter.name, rows), found, words)
    return 0 if answer >= 0 else 1


def _find_card(args: argparse.Namespace) -> int:
    """The smallest card with enough tokens; 0 if there is one."""
    command = program_command(args)
    names, headroom = cards_to_try(args)
    if args.tokens is None:
        raise BadInputError("--serve --find gpu needs to know how much is enough: give --tokens N.")
    names.sort(key=lambda name: -KNOWN_GPUS[name].total_bytes)
    asked = [_asked(Offer(KNOWN_GPUS[name], headroom), command, name) for name in names]
    runs, seen, answer = _looked(args, DEFAULT_GPU, asked)
    result = {
        "headroom_bytes": headroom,
        "wanted_tokens": args.tokens,
        "gpu": names[answer] if answer >= 0 else None,
        "cards": [
            {"gpu": names[at], "memory_bytes": KNOWN_GPUS[names[at]].total_bytes, **_seen_entry(one)}
            for at, one in sorted(seen.items(), reverse=True)
        ],
        "files": runs.files.all().as_json(),
    }
    found, words = "no card gives a cache", []
    if answer >= 0:
        found, words = f"{names[answer]} is the smallest card", ["--gpu", names[answer], *command]
    rows = [(one["gpu"], one) for one in result["cards"]]
    present(args, result, _print_found, args, [], ("card", rows), found, words)
    return 0 if answer >= 0 else 1


def _looked(args: argparse.Namespace, gpu: VirtualGPU, asked: Sequence[Asked]) -> tuple[Runs, dict[int, RunSeen], int]:
    """The runs that were made, by index, and the last with enough tokens; without --tokens, all values are run."""
    runs = Runs(args, gpu)
    seen: dict[int, RunSeen] = {}

    def enough(places: Sequence[int]) -> list[bool]:
        seen.update(zip(places, runs([asked[place] for place in places]), strict=True))
        return [_is_enough(asked[place].name, seen[place], args.tokens) for place in places]

    if args.tokens is not None:
        return runs, seen, last_enough(len(asked), enough)
    started = enough(range(len(asked)))
    return runs, seen, max((place for place, starts in enumerate(started) if starts), default=-1)


def _is_enough(name: str, seen: RunSeen, tokens: int | None) -> bool:
    if not seen.completes or tokens is None:
        return seen.completes
    found: int | None = _seen_entry(seen)["tokens"]
    if found is None:
        raise BadInputError(
            f"how many tokens the cache holds ({name}) is not known of this engine: let the program print a line `GPU "
            "KV cache size: N tokens`."
        )
    return found >= tokens


def _print_found(
    console: Console,
    args: argparse.Namespace,
    titles: list[str],
    table: tuple[str, list[tuple[str, dict[str, Any]]]],
    found: str,
    words: list[str],
) -> None:
    """Print what each run gave, what was found, and the `words` to type next, if anything was."""
    for title in titles:
        console.print(title)
    label, runs = table
    rows = []
    for name, one in runs:
        tokens = one["tokens"]
        fits = f"{tokens // args.length:,}" if args.length and tokens is not None else ""
        told = [f"{tokens:,}" if tokens is not None else "not known", fits, human_bytes(one["reserved_peak_bytes"])]
        rows.append([name, *(told if one["starts"] else ["does not start", "", ""])])
    columns = (label, "tokens", f"requests of {args.length:,}" if args.length else "requests", "reserved")
    print_table(console, columns, rows, indent="  ")
    if args.tokens is not None:
        print_lines(console, [f"{found} with at least {args.tokens:,} tokens"])
    if words:
        console.print(f"next: stalloc dryrun --serve {command_text(*words)}")
