"""Replay published ways to keep parameters in host memory: what a recorded step would move, and how long it takes.

FILE is a recording by `stalloc record --ops`; its last whole step is looked at. SIZE is what parameters, and what the
system keeps beside them, may take of a device; for TMO what is saved for backward.

PatrickStar: parameters and optimizer state in chunks of one size, of which those go that are needed latest (Belady), or
that were used longest ago (LRU). Elixir: the size of chunks, and how many stay on the device with their state, searched
together; what was rejected is shown. Angel-PTM: pages of 4 MiB. Harmony: packs of layers, for the forward and the
backward pass apart. STRONGHOLD: the smallest window of layers without a modelled stall. LoHan: how much of what layers
save is swapped, where the rest is recomputed. Mobius: stages that take turns on several GPUs (needs SciPy: `pip install
'stalloc[solver]'`). TMO: ranks on one link that swap saved tensors in turn, one copy at a time each way, either of sets
that have as little in common as can be or of the same, whichever is quicker; beside ranks that all swap the same at the
same moment. Smart-Infinity: the optimizer's update alone, in drives that compute, which share a link such as the GPU's.
Nothing is run; seconds are estimates, without the optimizer but for the last and LoHan's. All are models made from the
papers: none was compared with the system it is named after, which a line below the tables says, too.

JSON: for each of `devices` `data`, `patrickstar`, `elixir`, `angel`, `harmony`, `stronghold`, `lohan`, `mobius`,
`least_layers_bytes` (from where on Harmony and Mobius have an answer), `tmo`, `smart_infinity` and `notes`, in bytes
and seconds; what is not known is null.
"""

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console

from stalloc.cli import EXIT_DONE
from stalloc.cli.output import add_json_argument, file_label, note_texts, table_console, wants_text, write_json
from stalloc.cli.progress import working
from stalloc.cli.tables import print_prose, print_table
from stalloc.cost.swapping.replayed_systems import Machine, Swapping, replay_swapping
from stalloc.device import find_gpu, parse_memory
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, human_seconds, plural
from stalloc.trace import load_traces

_NO_ORACLE = "all of these are models made from the papers, without an oracle: not compared with the systems themselves"
_SHOWN = 6  #: candidates of Elixir's that were rejected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc swap`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="recording by stalloc record --ops")
    parser.add_argument("--budget", required=True, metavar="SIZE", help="of a device, for example 4GiB")
    parser.add_argument("--gpu", default="H100", metavar="NAME", help="for estimated times (default: H100)")
    parser.add_argument(
        "--gpus", type=int, default=4, metavar="N", help="that Mobius' stages take turns on (default: 4)"
    )
    parser.add_argument("--roots", type=int, default=2, metavar="N", help="of the bus, that share them (default: 2)")
    parser.add_argument(
        "--microbatches", type=int, default=4, metavar="N", help="of Mobius; the recorded step is one (default: 4)"
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="of TMO, on one link (default: 4)")
    parser.add_argument(
        "--drives", type=int, default=4, metavar="N", help="of Smart-Infinity, one NVMe drive each (default: 4)"
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Replay on each device of each file."""
    for name in ("gpus", "roots", "microbatches", "drives", "ranks"):
        if not 1 <= getattr(args, name) <= 64:
            raise BadInputError(f"--{name} is {getattr(args, name)}: give a number from 1 to 64.")
    gpu = find_gpu(args.gpu).name
    counts = args.gpus, args.roots, args.microbatches, args.drives, args.ranks
    machine = Machine(gpu, parse_memory(args.budget), *counts)
    found: list[tuple[str, int, Swapping]] = []
    for file in args.files:
        with working(f"replaying {file_label(file)}"):
            found += [(file, trace.device, replay_swapping(trace, machine)) for trace in load_traces(file)]
    write_json(args, {"devices": [{"file": file, "device": device} | asdict(made) for file, device, made in found]})
    if wants_text(args):
        console = table_console()
        for file, device, made in found:
            told = made.data
            print_prose(
                console,
                f"{file_label(file)}, device {device}: {plural(len(told.sizes), 'parameter')} of "
                f"{human_bytes(told.parameter_bytes)}, optimizer state of {human_bytes(told.state_bytes)}; "
                f"{human_bytes(machine.budget_bytes)} of {gpu}",
            )
            _print_chunks(console, made)
            _print_layers(console, made, machine)
            _print_ranks(console, made)
            _print_update(console, made)
            print_prose(console, _NO_ORACLE, indent="  ")
            for note in note_texts(made.notes):
                print_prose(console, f"note: {note}", indent="  ")
    return EXIT_DONE


def _print_chunks(console: Console, made: Swapping) -> None:
    rows = [
        [f"PatrickStar, {name}", human_bytes(one.chunk_bytes), f"{one.count:,}", f"{one.capacity:,}", "",
         human_bytes(moved.chunks * one.chunk_bytes)]
        for one in (made.patrickstar,) if one
        for name, moved in (("Belady", one.belady), ("LRU", one.lru))
    ]  # fmt: skip
    if made.angel:
        pages = made.angel
        numbers = f"{pages.count:,}", f"{pages.capacity:,}"
        rows.append(["Angel-PTM, pages", human_bytes(pages.page_bytes), *numbers, "", human_bytes(pages.moved_bytes)])
    best = made.elixir.best
    tried = [best] if best else []
    for one in (*tried, *made.elixir.rejected[:_SHOWN]):
        moved = one.refused or ("" if one.is_replayed else "at least ") + human_bytes(one.moved_bytes)
        name = "Elixir, chosen" if one is best else "Elixir, rejected"
        blocks = f"{one.residents + one.cached:,}" if one.cached or one.residents else ""
        rows.append([name, human_bytes(one.chunk_bytes), f"{one.count:,}", blocks, f"{one.residents:,}", moved])
    print_table(console, ("chunks", "size", "number", "room for", "stay", "moved by a step"), rows)
    left = len(made.elixir.rejected) - _SHOWN
    if left > 0:
        print_prose(console, f"{plural(left, 'more candidate')} of Elixir's in --json", indent="  ")


def _print_layers(console: Console, made: Swapping, machine: Machine) -> None:
    rows: list[list[str]] = []
    packs = made.harmony
    if packs:
        shown = f"packs of {_lengths(packs.forward)} layers, back {_lengths(packs.backward)}"
        rows.append(["Harmony", shown, human_bytes(packs.moved_bytes), human_seconds(packs.seconds)])
    if made.stronghold:
        window = made.stronghold
        shown = f"{window.layers} of {window.num_layers} layers at once, {human_bytes(window.num_bytes)}"
        rows.append(["STRONGHOLD", shown, human_bytes(window.moved_bytes), human_seconds(window.seconds)])
    if made.lohan:
        amount = made.lohan
        shown = f"{human_bytes(amount.swapped_bytes)} of {human_bytes(amount.saved_bytes)} of activations swapped"
        rows.append(["LoHan", shown, human_bytes(amount.moved_bytes), human_seconds(amount.seconds)])
    if made.mobius:
        stages = made.mobius.plan
        proven = "" if stages.is_optimal else ", not proven to be best"
        roots = " ".join(map(str, made.mobius.roots))
        shown = f"stages of {_lengths(stages.stages)} layers on {machine.num_gpus} GPUs, roots {roots}{proven}"
        rows.append(["Mobius", shown, "", human_seconds(stages.seconds)])
    print_table(console, ("layers", "", "moved by a step", "est. seconds"), rows, text_columns=2)


def _print_ranks(console: Console, made: Swapping) -> None:
    told = made.tmo
    if told is None:
        return
    rows = [
        [name, human_bytes(one.swapped_bytes), human_bytes(one.common_bytes), f"{one.most_at_once}-fold",
         human_bytes(one.moved_bytes), human_seconds(one.waited_seconds), human_seconds(one.seconds)]
        for name, one in (("all the same, at once", told.at_once), ("TMO, in turn", told.in_turn))
    ]  # fmt: skip
    title = f"{plural(told.num_ranks, 'rank')} on one link"
    columns = (title, "each swaps", "in common", "link asked for", "moved by a step", "waited", "est. seconds")
    print_table(console, columns, rows)


def _print_update(console: Console, made: Swapping) -> None:
    near = made.smart_infinity
    by_host, by_drives = (
        [human_bytes(moved), human_seconds(seconds)]
        for moved, seconds in ((near.host_moved_bytes, near.host_seconds), (near.moved_bytes, near.seconds))
    )
    where = f"in {plural(near.num_drives, 'drive')}, quicker from {near.pays_from} on"
    rows = [["ZeRO-Infinity", f"by the host, {plural(near.num_drives, 'drive')}", *by_host]]
    rows.append(["Smart-Infinity", where, *by_drives])
    print_table(console, ("update, all on disk", "", "moved by a step", "est. seconds"), rows, text_columns=2)


def _lengths(stretches: Any) -> str:
    return " ".join(str(end - begin) for begin, end in stretches)
