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

from stalloc.analysis.server_findings import DRIVER_GROWTH_BYTES
from stalloc.analysis.server_log import ServerLog, read_server_log
from stalloc.cli import EXIT_CHECK_FAILED, EXIT_DONE
from stalloc.cli.dryrun_report import Offer, last_lines
from stalloc.cli.dryrun_runs import Runs, headroom_of, offer_of, ran_out_text
from stalloc.cli.output import command_text, table_console, wants_text, write_json
from stalloc.cli.program import program_command
from stalloc.cli.sleep_report import print_sleep
from stalloc.cli.tables import print_items, print_prose, print_table
from stalloc.device import DEFAULT_GPU, VirtualGPU
from stalloc.device.context import SOURCE
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
    for option in ("length", "tokens"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise BadInputError(f"--{option} is {getattr(args, option)}: give a number from 1.")
    if args.ranks is not None:
        raise BadInputError("--serve runs on one GPU: leave --ranks out.")
    if args.node:
        raise BadInputError("--serve shows what the device holds: leave --node out, or try it without --serve.")
    if args.find == "gpu":
        return _find_card(args)
    if args.find:
        return _find_value(args)
    offer, command, runs = offer_of(args), program_command(args), Runs(args)
    runs.warm(offer.gpu)
    told = _measured(runs, offer, command)
    result = {**offer.as_json(), **told, "files": runs.files.all().as_json()}
    if wants_text(args):
        _print(result, offer, args)
        _print_next(result, command)
    write_json(args, result)
    enough = args.tokens is None or (told["tokens"] or 0) >= args.tokens
    return EXIT_DONE if told["starts"] and enough else EXIT_CHECK_FAILED


def _asked(offer: Offer, command: list[str], how: str, *, total_bytes: int = 0, record: bool = False) -> Asked:
    """A run on a card, or on one with more memory."""
    gpu = dataclasses.replace(
        offer.gpu, total_bytes=total_bytes or offer.gpu.total_bytes, context_bytes=offer.headroom_bytes
    )
    variables = {name: os.environ.get(name, value) for name, value in _VARIABLES.items()}
    work = RunWork(gpu=gpu, watch_server=True, keep_history=record, name_holders=True, variables=variables)
    return Asked(command=command, work=work, name=how)


def _measured(runs: Runs, offer: Offer, command: list[str]) -> dict[str, Any]:
    """What a program divides a card into."""
    larger = offer.gpu.total_bytes + offer.gpu.total_bytes // _LARGER
    seen, seen_larger = runs(
        [
            _asked(offer, command, offer.gpu.name, record=True),
            _asked(offer, command, f"with {human_bytes(larger)}", total_bytes=larger, record=True),
        ]
    )
    log = _log(seen)
    served = None
    if seen.traces and seen_larger.traces:
        served = read_served(seen.traces[0], seen_larger.traces[0])
    told = {**_seen_entry(seen, log), "by": "run" if served is not None else "log" if log is not None else None}
    told |= _divided(served, log)
    return told | {"tokens_least": _least_tokens(told, log), "uncertain": seen.findings}


def _log(seen: RunSeen) -> ServerLog | None:
    return read_server_log((seen.server or {}).get("output", ""))


def _tokens(seen: RunSeen, log: ServerLog | None) -> int | None:
    """How many tokens the cache holds; None where the engine is not known."""
    if not seen.completes:
        return None
    tokens: int | None = (seen.server or {}).get("tokens")
    return tokens if tokens is not None else log.tokens if log is not None else None


def _seen_entry(seen: RunSeen, log: ServerLog | None) -> dict[str, Any]:
    server = seen.server or {}
    return {
        "starts": seen.completes,
        "tokens": _tokens(seen, log),
        "reserved_peak_bytes": max((one["reserved_peak_bytes"] for one in seen.devices), default=0),
        **{name: server.get(name, 0) for name in ("num_graphs", "pinned_bytes")},
        "graph_bytes": server.get("graph_bytes") or (log.graphs_bytes or 0 if log is not None else 0),
        "engine": log.engine if log is not None else None,
        "ran_out": dataclasses.asdict(seen.ran_out) if seen.ran_out is not None else None,
        "sleep": {**server["sleep"], "is_given_plenty": False} if server.get("sleep") else None,
    }


def _divided(served: Served | None, log: ServerLog | None) -> dict[str, Any]:
    """Weights, activations and cache, from the run if it shows them, else from the program's own log."""
    if served is not None:
        return dataclasses.asdict(served)
    nothing = dict.fromkeys((one.name for one in dataclasses.fields(Served)), None)
    if log is None:
        return nothing
    return nothing | {
        "weights_bytes": log.weights_bytes,
        "activation_bytes": log.activation_bytes,
        "cache_bytes": log.cache_bytes,
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


def _print(result: dict[str, Any], offer: Offer, args: argparse.Namespace) -> None:
    console = table_console()
    name = shown_with_memory("virtual", printable(offer.gpu.name), offer.gpu.total_bytes)
    console.print(f"{name}: {human_bytes(offer.program_bytes)} free as the program begins")
    if not result["starts"]:
        why = f": {ran_out_text(result['ran_out'])}" if result["ran_out"] else ""
        slept = result["sleep"] and f"it runs out of memory after `{printable(result['sleep']['ended_in'])}`"
        if slept is None or result["sleep"]["ran_out"] is None:  # else the phases are followed by more than that
            print_prose(console, f"{slept or 'it does not start, for lack of memory'}{why}", indent="  ")
        _print_sleep(console, result)
        return
    rows = [
        ("weights", result["weights_bytes"], "and what else is live as the cache is made"),
        ("activation peak", result["activation_bytes"], _place(result["activation_at"], "above the weights, before")),
        ("cache", result["cache_bytes"], _cache_text(result, args)),
        ("CUDA graphs", result["graph_bytes"] or None, _graphs_text(result)),
        ("while serving", result["serving_bytes"], _place(result["serving_at"], "above weights and cache")),
        ("reserved", result["reserved_peak_bytes"] or None, "by PyTorch, at the most"),
    ]
    print_items(console, [(name, human_bytes(size), text) for name, size, text in rows if size is not None])
    _print_sleep(console, result)
    for line in [*_places(result), *_notes(result), *_unseen(result, offer), *last_lines(result)]:
        print_prose(console, line, indent="  ")


def _print_sleep(console: Console, result: dict[str, Any]) -> None:
    if result["sleep"] is not None:
        print_sleep(console, result["sleep"], "context included", human_bytes(result["memory_bytes"]))


def _place(place: str | None, otherwise: str) -> str:
    return f"{otherwise}: {printable(place)}" if place and place != UNKNOWN else otherwise


def _graphs_text(result: dict[str, Any]) -> str:
    return f"reserved in the pools of {result['num_graphs']} graphs" if result["num_graphs"] else ""


def _cache_text(result: dict[str, Any], args: argparse.Namespace) -> str:
    tokens, at = result["tokens"], result["cache_at"] or []
    if tokens is None:
        return "what grows with the card"
    each = f", {result['cache_bytes'] / tokens / 1024:.1f} KiB each" if result["cache_bytes"] and len(at) < 2 else ""
    fits = f": {tokens // args.length:,} requests of {args.length:,} tokens" if args.length else ""
    return f"{tokens:,} tokens{each}{fits}"


def _places(result: dict[str, Any]) -> list[str]:
    """Which lines make the cache."""
    at = [f"{human_bytes(size)} by {printable(place)}" for place, size in (result["cache_at"] or [])[:_MOST_SITES]]
    return [f"the cache and what else grows with the card: {', '.join(at)}"] if at else []


def _notes(result: dict[str, Any]) -> list[str]:
    lines = []
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
    """The memory that no run here can see, with what is known of it."""
    lines = []
    if offer.headroom_bytes:
        kept = human_bytes(offer.headroom_bytes)
        source = SOURCE if offer.headroom_source == SOURCE else "--headroom"
        lines.append(f"not seen here: the CUDA context, for which {kept} are taken off what is free ({source})")
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


def _print_next(result: dict[str, Any], command: list[str]) -> None:
    console, words = table_console(), command_text(*command)
    if result["starts"] and result["tokens"]:
        console.print(f"next: stalloc dryrun --serve --find gpu --tokens {result['tokens']} {words}")
    else:
        console.print("next: the same with a larger --gpu, or other settings of the engine")


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
    runs = Runs(args)
    runs.warm(offer.gpu)
    asked = [_asked(offer, parameter.filled(command, value), parameter.label(value)) for value in values]
    seen, answer = _looked(runs, asked, args.tokens)
    result = {
        **offer.as_json(),
        "parameter": parameter.name,
        "wanted_tokens": args.tokens,
        "largest": values[answer] if answer >= 0 else None,
        "values": [{"value": values[at], **_seen_entry(one, _log(one))} for at, one in sorted(seen.items())],
        "files": runs.files.all().as_json(),
    }
    if wants_text(args):
        console = table_console()
        console.print(offer.title())
        _print_rows(parameter.name, [(str(one["value"]), one) for one in result["values"]], args)
        if args.tokens is not None:
            found = f"{parameter.label(values[answer])} is the largest" if answer >= 0 else "no value gives a cache"
            print_prose(console, f"{found} with at least {args.tokens:,} tokens", indent="  ")
        if answer >= 0:
            words = command_text(*parameter.filled(command, values[answer]))
            console.print(f"next: stalloc dryrun --serve{f' --gpu {args.gpu}' if args.gpu else ''} {words}")
    write_json(args, result)
    return EXIT_DONE if answer >= 0 else EXIT_CHECK_FAILED


def _find_card(args: argparse.Namespace) -> int:
    """The smallest card with enough tokens; 0 if there is one."""
    command, headroom = program_command(args), headroom_of(args)
    if args.gpu or args.memory:
        raise BadInputError("--find gpu looks through all cards: leave --gpu and --memory out.")
    if args.tokens is None:
        raise BadInputError("--serve --find gpu needs to know how much is enough: give --tokens N.")
    names = sorted(KNOWN_GPUS, key=lambda name: -KNOWN_GPUS[name].total_bytes)
    names = [name for name in names if KNOWN_GPUS[name].total_bytes > headroom]
    if not names:
        raise BadInputError(f"a headroom of {args.headroom} leaves nothing of any card: give less.")
    runs = Runs(args)
    runs.warm(DEFAULT_GPU)
    asked = [_asked(Offer(KNOWN_GPUS[name], headroom), command, name) for name in names]
    seen, answer = _looked(runs, asked, args.tokens)
    result = {
        "headroom_bytes": headroom,
        "wanted_tokens": args.tokens,
        "gpu": names[answer] if answer >= 0 else None,
        "cards": [
            {"gpu": names[at], "memory_bytes": _memory(names[at]), **_seen_entry(one, _log(one))}
            for at, one in sorted(seen.items(), reverse=True)
        ],
        "files": runs.files.all().as_json(),
    }
    if wants_text(args):
        console = table_console()
        _print_rows("card", [(one["gpu"], one) for one in result["cards"]], args)
        found = f"{names[answer]} is the smallest card" if answer >= 0 else "no card gives a cache"
        print_prose(console, f"{found} with at least {args.tokens:,} tokens", indent="  ")
        if answer >= 0:
            console.print(f"next: stalloc dryrun --serve --gpu {names[answer]} {command_text(*command)}")
    write_json(args, result)
    return EXIT_DONE if answer >= 0 else EXIT_CHECK_FAILED


def _memory(name: str) -> int:
    gpu: VirtualGPU = KNOWN_GPUS[name]
    return gpu.total_bytes


def _looked(runs: Runs, asked: Sequence[Asked], tokens: int | None) -> tuple[dict[int, RunSeen], int]:
    """The runs that were made, by index, and the last with enough tokens; without `tokens`, all values are run."""
    seen: dict[int, RunSeen] = {}

    def enough(places: Sequence[int]) -> list[bool]:
        seen.update(zip(places, runs([asked[place] for place in places]), strict=True))
        return [_is_enough(asked[place].name, seen[place], tokens) for place in places]

    if tokens is not None:
        return seen, last_enough(len(asked), enough)
    started = enough(range(len(asked)))
    return seen, max((place for place, starts in enumerate(started) if starts), default=-1)


def _is_enough(name: str, seen: RunSeen, tokens: int | None) -> bool:
    if not seen.completes or tokens is None:
        return seen.completes
    found = _tokens(seen, _log(seen))
    if found is None:
        raise BadInputError(
            f"how many tokens the cache holds ({name}) is not known of this engine: let the program print a line `GPU "
            "KV cache size: N tokens`."
        )
    return found >= tokens


def _print_rows(label: str, found: Sequence[tuple[str, dict[str, Any]]], args: argparse.Namespace) -> None:
    rows = []
    for name, one in found:
        tokens = one["tokens"]
        fits = f"{tokens // args.length:,}" if args.length and tokens is not None else ""
        told = [f"{tokens:,}" if tokens is not None else "not known", fits, human_bytes(one["reserved_peak_bytes"])]
        rows.append([name, *(told if one["starts"] else ["does not start", "", ""])])
    columns = (label, "tokens", f"requests of {args.length:,}" if args.length else "requests", "reserved")
    print_table(table_console(), columns, rows, indent="  ")
