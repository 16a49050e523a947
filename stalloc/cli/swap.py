"""Replay published ways to keep parameters in host memory: what a recorded step would move, and how long it takes.

FILE is a recording by `stalloc record --ops`, of which the last whole step counts. SIZE is the device memory for
parameters and what the system keeps with them; for TMO it is for what is saved for backward.

Chunks: PatrickStar, Elixir and the pages of Angel-PTM. Layers: the packs of Harmony, the window of STRONGHOLD, LoHan's
share of activations that is swapped, and the stages of Mobius on several GPUs. Ranks: TMO, whose ranks take turns on
one link. Updates: Smart-Infinity, in drives that compute. docs/swapping.md says what each is. Nothing is run; seconds
are estimates. All are models made from the papers; none was compared with the system itself.

JSON: for each of `devices` `data`, `patrickstar`, `elixir`, `angel`, `harmony`, `stronghold`, `lohan`, `mobius`,
`least_layers_bytes` (from where on Harmony and Mobius have an answer), `tmo`, `smart_infinity` and `notes`, in bytes
and seconds; what is not known is null.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from stalloc.cli import EXIT_DONE
from stalloc.cli.output import add_json_argument, file_label, note_texts, table_console, wants_text, write_json
from stalloc.cli.progress import working
from stalloc.cli.tables import print_prose, print_table
from stalloc.cost.swapping.harmony import PackPlan
from stalloc.cost.swapping.mobius import StagePlan
from stalloc.cost.swapping.replayed_systems import Machine, Swapping, replay_swapping
from stalloc.device import find_gpu, parse_memory
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, human_seconds, plural
from stalloc.trace import load_traces

_NO_ORACLE = "models made from papers, none compared with the system itself"
_COUNTS = (
    ("gpus", 4, "GPUs that the stages of Mobius take turns on"),
    ("roots", 2, "roots of the bus that these GPUs share"),
    ("microbatches", 4, "microbatches of Mobius; the recorded step is one"),
    ("drives", 4, "NVMe drives of Smart-Infinity"),
    ("ranks", 4, "ranks of TMO on one link"),
)
_SHOWN = 6  #: candidates of Elixir's that were rejected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stalloc swap`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="recording by stalloc record --ops")
    parser.add_argument("--budget", required=True, metavar="SIZE", help="of a device, for example 4GiB")
    parser.add_argument("--gpu", default="H100", metavar="NAME", help="for estimated times (default: H100)")
    for name, default, what in _COUNTS:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Replay on each device of each file."""
    counts = [getattr(args, name) for name, _, _ in _COUNTS]
    for (name, _, _), count in zip(_COUNTS, counts, strict=True):
        if not 1 <= count <= 64:
            raise BadInputError(f"--{name} is {count}: give a number from 1 to 64.")
    gpu = find_gpu(args.gpu).name
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
            chunks = [
                [name, human_bytes(size), *("" if one is None else f"{one:,}" for one in numbers), moved]
                for name, size, *numbers, moved in _chunks(made)
            ]
            print_prose(
                console,
                f"{file_label(file)}, device {device}: {plural(len(told.sizes), 'parameter')} of "
                f"{human_bytes(told.parameter_bytes)}, optimizer state of {human_bytes(told.state_bytes)}; "
                f"{human_bytes(machine.budget_bytes)} of {gpu}",
            )
            print_table(console, ("chunks", "size", "number", "room for", "stay", "moved by a step"), chunks)
            if (left := len(made.elixir.rejected) - _SHOWN) > 0:
                print_prose(console, f"{plural(left, 'more candidate')} of Elixir's in --json", indent="  ")
            rows = [
                [system, shown, "" if moved is None else human_bytes(moved), human_seconds(seconds)]
                for system, shown, moved, seconds in _systems(made, machine)
            ]
            print_table(console, ("system", _NO_ORACLE, "moved by a step", "est. seconds"), rows, text_columns=2)
            for note in note_texts(made.notes):
                print_prose(console, f"note: {note}", indent="  ")
    return EXIT_DONE


def _chunks(made: Swapping) -> Iterator[tuple[str, int, int, int | None, int | None, str]]:
    """A system, bytes of its chunks, how many there are, have room and stay, and what is moved."""
    if one := made.patrickstar:
        for name, moved in (("PatrickStar, Belady", one.belady), ("PatrickStar, LRU", one.lru)):
            yield name, one.chunk_bytes, one.count, one.capacity, None, human_bytes(moved.chunks * one.chunk_bytes)
    if pages := made.angel:
        yield "Angel-PTM, pages", pages.page_bytes, pages.count, pages.capacity, None, human_bytes(pages.moved_bytes)
    best = made.elixir.best
    for choice in (*([best] if best else []), *made.elixir.rejected[:_SHOWN]):
        moved_text = choice.refused or ("" if choice.is_replayed else "at least ") + human_bytes(choice.moved_bytes)
        name = "Elixir, chosen" if choice is best else "Elixir, rejected"
        room = choice.residents + choice.cached or None
        yield name, choice.chunk_bytes, choice.count, room, choice.residents, moved_text


def _systems(made: Swapping, machine: Machine) -> Iterator[tuple[str, str, int | None, float]]:
    """A system, what it makes of the step, the bytes that it moves if they are known, and seconds."""
    if packs := made.harmony:
        shown = f"packs of {_lengths(packs.forward)} layers, back {_lengths(packs.backward)}{_proven(packs)}"
        yield "Harmony", shown, packs.moved_bytes, packs.seconds
    if window := made.stronghold:
        shown = f"{window.layers} of {window.num_layers} layers at once, {human_bytes(window.num_bytes)}"
        yield "STRONGHOLD", shown, window.moved_bytes, window.seconds
    if amount := made.lohan:
        shown = f"{human_bytes(amount.swapped_bytes)} of {human_bytes(amount.saved_bytes)} of activations swapped"
        yield "LoHan", shown, amount.moved_bytes, amount.seconds
    if made.mobius:
        stages = made.mobius.plan
        shown = f"stages of {_lengths(stages.stages)} layers on {plural(machine.num_gpus, 'GPU')}{_proven(stages)}"
        yield "Mobius", shown, None, stages.seconds
    if made.tmo:
        ranks = plural(made.tmo.num_ranks, "rank")
        for name, one in ((f"{ranks} at once", made.tmo.at_once), (f"TMO, {ranks}", made.tmo.in_turn)):
            shown = f"{human_bytes(one.swapped_bytes)} swapped by each, waiting for {human_seconds(one.waited_seconds)}"
            yield name, shown, one.moved_bytes, one.seconds
    near = made.smart_infinity
    drives = plural(near.num_drives, "drive")
    yield "ZeRO-Infinity", f"the update alone, by the host, {drives}", near.host_moved_bytes, near.host_seconds
    shown = f"the update alone, in {drives}; quicker from {near.pays_from} on"
    yield "Smart-Infinity", shown, near.moved_bytes, near.seconds


def _proven(plan: PackPlan | StagePlan) -> str:
    return "" if plan.is_optimal else ", not proven to be best"


def _lengths(stretches: Iterable[tuple[int, int]]) -> str:
    return " ".join(str(end - begin) for begin, end in stretches)
