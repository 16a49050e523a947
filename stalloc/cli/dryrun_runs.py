"""`stalloc dryrun` of one program and of ranks, and what all its parts share: the offer, the allocators, the runs.

A rank is run by itself, without the others. For one program one run is made after another: two runs at a time may want
the same port, or too much of the host's memory.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from stalloc.allocator_conf import only_this
from stalloc.cli.native import native_settings
from stalloc.cli.output import check_numbers, command_text, present, size_text
from stalloc.cli.program import chosen_gpu, program_command, program_files, run_program
from stalloc.cli.progress import lines_told
from stalloc.cli.sizing_report import allocator_name, last_lines, print_node, print_sleep, ran_out_text
from stalloc.cli.tables import print_lines, print_prose, print_table
from stalloc.device import DEFAULT_GPU, VirtualGPU
from stalloc.device.known_gpus import (
    ASSUMED_BYTES,
    CONTEXT_SOURCE,
    KNOWN_GPUS,
    PLENTY,
    memory_option,
    shown_with_memory,
)
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.printable import printable
from stalloc.replay.simulation import Candidate, least_memory
from stalloc.sandbox import ProgramFiles
from stalloc.sizing.fake_ranks import Rank
from stalloc.sizing.node import NodeMemory, node_memory
from stalloc.sizing.side_by_side import Asked, RunSeen, RunWork, run_all, side_by_side, warm
from stalloc.sizing.tries import NEEDED, Contender, Otherwise, Tries, Wanted, known_to_replay
from stalloc.trace import Trace

_MOST_RANKS = 1 << 16
_FIGURES = ("needed_bytes", "taken_bytes", "allocated_peak_bytes")  # of a need, in the order of the table


@dataclass(frozen=True)
class Offer:
    """A card, and how much of its memory is for the program."""

    gpu: VirtualGPU
    headroom_bytes: int

    @property
    def program_bytes(self) -> int:
        return self.gpu.total_bytes - self.headroom_bytes

    @property
    def headroom_source(self) -> str:
        return CONTEXT_SOURCE if self.headroom_bytes == ASSUMED_BYTES else "--headroom"

    def as_json(self) -> dict[str, Any]:
        """The keys that every dry run's JSON has."""
        return {
            "gpu": self.gpu.name,
            "memory_bytes": self.gpu.total_bytes,
            "headroom_bytes": self.headroom_bytes,
            "headroom_source": self.headroom_source,
        }

    def title(self) -> str:
        name = shown_with_memory("virtual", printable(self.gpu.name), self.gpu.total_bytes)
        headroom = human_bytes(self.headroom_bytes)
        kept = f", {headroom} for the CUDA context and NCCL" if self.headroom_bytes else ""
        return f"{name}: {human_bytes(self.program_bytes)} for the program{kept}"


def offer_of(args: argparse.Namespace) -> Offer:
    """What the options say. Raises BadInputError where nothing is left for the program."""
    made = Offer(chosen_gpu(args) or DEFAULT_GPU, _headroom_of(args))
    if made.program_bytes <= 0:
        raise BadInputError(f"a headroom of {args.headroom} leaves nothing of {made.gpu.name}: give less.")
    return made


def cards_to_try(args: argparse.Namespace) -> tuple[list[str], int]:
    """The cards of a search for one, the smallest first, and the headroom. Raises BadInputError where there is none."""
    if args.gpu or args.memory:
        raise BadInputError("--find gpu looks through all cards: leave --gpu and --memory out.")
    headroom = _headroom_of(args)
    names = sorted(KNOWN_GPUS, key=lambda name: KNOWN_GPUS[name].total_bytes)
    names = [name for name in names if KNOWN_GPUS[name].total_bytes > headroom]
    if not names:
        raise BadInputError(f"a headroom of {args.headroom} leaves nothing of any card: give less.")
    return names, headroom


def _headroom_of(args: argparse.Namespace) -> int:
    return memory_option("--headroom", args.headroom) if args.headroom != "0" else 0


def with_memory(gpu: VirtualGPU, total_bytes: int) -> VirtualGPU:
    return dataclasses.replace(gpu, total_bytes=total_bytes)


class Runs:
    """Runs of the program side by side, for which this process is warm, told on a terminal as they end."""

    def __init__(self, args: argparse.Namespace, gpu: VirtualGPU) -> None:
        check_numbers(args, 0, "jobs", "steps")
        self._rank: Rank | None = None
        if args.ranks is not None and args.find:
            self._rank, *others = _chosen_ranks(args)
            if others:
                raise BadInputError(
                    "--find with --ranks tries one rank: name the one that needs most, for example --rank 0."
                )
        self._jobs = side_by_side(args.jobs)
        self._command = program_command(args)
        self.files = program_files(args, self._command)
        self._tell = lines_told()
        self._began = time.monotonic()
        self._num_told = 0
        self._tell("importing the libraries")
        warm(with_memory(gpu, PLENTY), self._command)

    def __call__(self, asked: Sequence[Asked]) -> list[RunSeen]:
        if self._rank is not None:
            asked = [_as_rank(one, self._rank) for one in asked]
        return run_all(asked, run_program, self._jobs, self._told, self.files)

    def _told(self, asked: Asked, seen: RunSeen) -> None:
        self._num_told += 1
        reserved = max((device["reserved_peak_bytes"] for device in seen.devices), default=0)
        how = f"takes {human_bytes(reserved)}" if seen.completes else "runs out of memory"
        self._tell(f"run {self._num_told}, {time.monotonic() - self._began:.0f} s: {asked.name}: {how}")


def contenders(gpu: VirtualGPU, num_steps: int) -> list[Contender]:
    """The allocators that a dry run compares, each on a card with what is offered."""
    made = []
    for name, (_, conf, _) in zip(("native", "expandable"), native_settings(), strict=False):
        candidate = Candidate("torch", conf)
        exact = known_to_replay(candidate)
        work = RunWork(gpu=gpu, num_steps=num_steps, variables=only_this(conf))
        known = candidate if exact else None
        made.append(Contender(name=name, shown=allocator_name(name), candidate=known, is_exact=exact, work=work))
    work, ours = RunWork(gpu=gpu, under="stalloc", num_steps=num_steps), Candidate("stalloc")
    return [*made, Contender(name="stalloc", shown="stalloc", candidate=ours, is_exact=False, work=work)]


def _chosen_ranks(args: argparse.Namespace) -> list[Rank]:
    if not 1 <= args.ranks <= _MOST_RANKS:
        raise BadInputError(f"--ranks is {args.ranks}: give the number of processes that torchrun starts in all.")
    if args.rank == "all":
        return [Rank(number=number, num_ranks=args.ranks) for number in range(args.ranks)]
    words, last = args.rank.split(","), args.ranks - 1
    if not all(word.isascii() and word.isdigit() and len(word) < 9 and int(word) <= last for word in words):
        raise BadInputError(f"--rank is {args.rank[:40]!r}: give all, or ranks from 0 to {last} with commas between.")
    return [Rank(number=number, num_ranks=args.ranks) for number in sorted(set(map(int, words)))]


def _as_rank(one: Asked, rank: Rank) -> Asked:
    gpu = dataclasses.replace(one.work.gpu, num_devices=rank.num_local)
    variables = one.work.variables | rank.variables()
    return dataclasses.replace(one, work=dataclasses.replace(one.work, gpu=gpu, is_rank=True, variables=variables))


def try_ranks(args: argparse.Namespace) -> int:
    """Try the ranks; 0 if each fits with stalloc."""
    command, offer = program_command(args), offer_of(args)
    ranks = _chosen_ranks(args)
    runs = Runs(args, offer.gpu)
    tried = contenders(with_memory(offer.gpu, offer.program_bytes), args.steps)
    of = {rank.number: rank for rank in ranks}

    def run(asked: Sequence[Asked]) -> list[RunSeen]:
        return runs(
            [_as_rank(dataclasses.replace(one, command=one.command[1:]), of[int(one.command[0])]) for one in asked]
        )

    tries = Tries(list(of), lambda number: [str(number), *command], "rank {}".format, tried, offer.program_bytes, run)
    everything = range(len(ranks))
    tries.do([Wanted("observe", NEEDED, at) for at in everything])
    tries.do([Wanted("find out", one.name, at) for one in tried for at in everything])
    # of the first rank that does not fit it is shown where memory runs out
    failing = ((one, [at for at in everything if tries.fits(one.name, at) is False]) for one in tried)
    tries.do([Wanted("fail", one.name, places[0]) for one, places in failing if places])
    most = max(everything, key=lambda at: tries.needed_bytes(at) or 0)
    node = node_memory(
        offer.gpu,
        {tries.values[at]: (seen.devices, seen.process) for at, seen in sorted(tries.observed.items())},
        num_local=ranks[0].num_local,
        files_bytes=runs.files.all().written_bytes,
    )
    result = {
        **offer.as_json(),
        "num_ranks": ranks[0].num_ranks,
        "ranks": [
            {"rank": tries.values[at], "needed_bytes": tries.needed_bytes(at)}
            | {name: _rank_under(tries, name, at) for name in tries.contenders}
            for at in everything
        ],
        "uncertain": tries.findings(dict.fromkeys(tries.contenders, most)),
        "num_runs": tries.num_runs,
        "files": runs.files.all().as_json(),
        "node": node.as_json(),
    }
    present(args, result, _print_ranks, result, tries, offer, command, node, args.node)
    return 0 if all(tries.fits("stalloc", at) for at in everything) else 1


def _rank_under(tries: Tries, name: str, at: int) -> dict[str, Any]:
    seen, failed = tries.limited.get((name, at)), tries.failed.get((name, at))
    reserved = [device["reserved_peak_bytes"] for device in seen.devices] if seen is not None else []
    return {
        "fits": tries.fits(name, at),
        "reserved_peak_bytes": max(reserved) if reserved else tries.reserved_bytes(name, at),
        "ran_out": ran_out_entry(failed),
    }


def ran_out_entry(seen: RunSeen | None) -> dict[str, Any] | None:
    """Where a run ran out of memory, as JSON has it."""
    return None if seen is None or seen.ran_out is None else dataclasses.asdict(seen.ran_out)


def _print_ranks(
    console: Console,
    result: dict[str, Any],
    tries: Tries,
    offer: Offer,
    command: list[str],
    node: NodeMemory,
    whole_node: bool,
) -> None:
    console.print(offer.title())
    rows = []
    for told in result["ranks"]:
        live = told["needed_bytes"]
        cells = ["" if live is None else human_bytes(live)]
        for under in (told[name] for name in tries.contenders):
            reserved = under["reserved_peak_bytes"]
            fits = "fits" if reserved is None else human_bytes(reserved)
            cells.append(fits if under["fits"] else "does not fit")
        rows.append([f"rank {told['rank']}", *cells])
    columns = (f"of {result['num_ranks']}", "live at a time", *(one.shown for one in tries.contenders.values()))
    print_table(console, columns, rows, indent="  ")
    print_prose(console, "under each allocator: what is reserved, or that it does not fit", indent="  ")
    for told in result["ranks"]:
        for name, one in tries.contenders.items():
            if (ran_out := told[name]["ran_out"]) is not None:
                print_prose(console, f"rank {told['rank']}, {one.shown}: {ran_out_text(ran_out)}", indent="  ")
    print_node(console, node, offer.headroom_bytes, whole=whole_node)
    text = "no other rank is there: each is taken to hold what this one does; NCCL's own memory is part of the headroom"
    print_lines(console, [text, *last_lines(result)])
    words = command_text(*command)
    console.print(f"next: STALLOC=1 torchrun --nproc-per-node {min(result['num_ranks'], 8)} {words} on real GPUs")


@dataclass(frozen=True, kw_only=True)
class _Need:
    """One allocator and the program, on the device that takes most."""

    fits: bool
    needed_bytes: int
    """The least memory in which the program completes."""
    needed_by: str
    """How that is known: "replay", "run" with no more than that, or "reserved": nothing less was tried."""
    taken_bytes: int
    """The reserved peak on a device with plenty of memory."""
    allocated_peak_bytes: int
    uses_torch: bool = True
    devices: dict[int, dict[str, int]] = field(default_factory=dict)
    sleep: dict[str, Any] | None = None
    """The phases, where the program sleeps."""

    def with_needed(self, size_bytes: int) -> "_Need":
        devices = {index: {**figures, "needed_bytes": size_bytes} for index, figures in self.devices.items()}
        return dataclasses.replace(self, needed_bytes=size_bytes, needed_by="run", devices=devices)


def find_needs(args: argparse.Namespace) -> int:
    """Try the program natively and with stalloc; 0 if it fits with stalloc."""
    command, offer = program_command(args), offer_of(args)
    files, tell = program_files(args, command), lines_told()
    tell("importing the libraries")
    warm(with_memory(offer.gpu, PLENTY), command)
    needs, uncertain, native = _found(_Program(command, offer, files), tell)
    node = node_memory(offer.gpu, {None: (native.devices, native.process)}, files_bytes=files.all().written_bytes)
    devices: dict[int, dict[str, Any]] = {}
    for name, need in needs.items():
        for index, device in need.devices.items():
            devices.setdefault(index, {"device": index})[name] = device
    keys = ("fits", "needed_bytes", "needed_by", "taken_bytes", "allocated_peak_bytes")
    result = {
        **offer.as_json(),
        **{name: {key: getattr(need, key) for key in keys} for name, need in needs.items()},
        "devices": [devices[index] for index in sorted(devices)],
        "sleep": needs["stalloc"].sleep,
        "uncertain": uncertain,
        "files": files.all().as_json(),
        "node": node.as_json(),
    }
    present(args, result, _print_needs, result, needs, offer, command, node, args.node)
    return 0 if needs["stalloc"].fits else 1


class _Program:
    """The program, and the allocators that it is run under."""

    def __init__(self, command: list[str], offer: Offer, files: ProgramFiles) -> None:
        self._command, self._files, self.offered = command, files, offer.program_bytes
        self.contenders = {one.name: one for one in contenders(with_memory(offer.gpu, offer.program_bytes), 0)}

    def run(self, asked: Sequence[Asked]) -> list[RunSeen]:
        """Make these runs. Raises SetupError where the program fails for another reason than memory."""
        return run_all(asked, run_program, 1, lambda *_: None, self._files)

    def asked(self, name: str, size_bytes: int, **how: Any) -> Asked:
        """A run under one allocator on a device of that many bytes; `how`: other fields of its `RunWork`."""
        work = self.contenders[name].work
        work = dataclasses.replace(work, gpu=with_memory(work.gpu, size_bytes), at_first_use=True, **how)
        return Asked(command=self._command, work=work, name=name)

    def seen(self, name: str, size_bytes: int, **how: Any) -> RunSeen:
        (seen,) = self.run([self.asked(name, size_bytes, **how)])
        return seen


def _found(program: _Program, tell: Callable[[str], None]) -> tuple[dict[str, _Need], dict[str, Any], RunSeen]:
    """The needs by allocator, what the native run could not know, and that run."""
    seen: dict[str, RunSeen] = {}  # on the card
    needs: dict[str, _Need] = {}
    native = None
    for number, (name, one) in enumerate(program.contenders.items(), start=1):
        if name == "expandable" and native is not None and not native.uses_torch:
            continue
        tell(f"running the program under {allocator_name(name)}, {number} of {len(program.contenders)}")
        plenty = card = program.seen(name, PLENTY, keep_history=name == "native")
        if not plenty.completes or any(device["reserved_peak_bytes"] > program.offered for device in plenty.devices):
            card = program.seen(name, program.offered)
        seen[name], native = card, native or plenty
        if native.traces:
            tell(f"replaying what it needs under {allocator_name(name)}")
        needs[name] = _need(plenty, card, _replayed(native.traces, one), program.offered)
    assert native is not None  # the first contender
    otherwise = Otherwise(program.run)
    uncertain = _uncertain(program, otherwise, native, needs["native"])
    ours = needs["stalloc"]
    if ours.needed_by == "replay" and len(ours.devices) == 1:
        tell(f"running the program under stalloc with {human_bytes(ours.needed_bytes)}")
        needs["stalloc"] = _confirmed(program, ours)
    if (shared := uncertain["shared_blocks"]) and shared["taken_bytes"] > program.offered:
        tell("running the program with work done later")
        uncertain["order_decides"] = [
            told
            for name, card in seen.items()
            if card.completes and (told := otherwise.decides(name, program.asked(name, program.offered), card))
        ]
    return needs, uncertain, native


def _replayed(traces: Sequence[Trace], one: Contender) -> dict[int, int]:
    """The least memory of each device, by replay; empty without a history, or a model with these settings."""
    return {trace.device: least_memory(trace, one.candidate) for trace in traces if one.candidate is not None}


def _need(plenty: RunSeen, card: RunSeen, replayed: dict[int, int], offered: int) -> _Need:
    """What one allocator was seen to do with plenty of memory and on the card, the runs before the replay."""
    devices, sleep = {}, _phases(plenty, card)
    phases = sleep["phases"] if sleep is not None and len(plenty.devices) == 1 else []
    awake = max((one["allocated_peak_bytes"] for one in phases), default=0)
    for device in plenty.devices:
        taken, allocated = device["reserved_peak_bytes"], device["allocated_peak_bytes"]
        # a replay knows of no sleep
        least = awake or max(replayed.get(device["device"], taken), allocated)
        least = min(least, offered, taken) if card.completes else min(least, taken)
        devices[device["device"]] = {"needed_bytes": least, "taken_bytes": taken, "allocated_peak_bytes": allocated}
    return _Need(
        fits=card.completes,
        needed_by="replay" if replayed else "reserved",
        uses_torch=plenty.uses_torch,
        devices=devices,
        sleep=sleep,
        **{key: max((entry[key] for entry in devices.values()), default=0) for key in _FIGURES},
    )


def _phases(plenty: RunSeen, card: RunSeen) -> dict[str, Any] | None:
    """The phases of the run on the card if it completes, else of that with plenty; and where memory ran out on it."""
    is_given_plenty = not card.completes
    told, ran_out = (plenty if is_given_plenty else card).sleep, (card.sleep or {}).get("ran_out")
    if told is None and ran_out is None:
        return None
    return {"phases": [], "ended_in": "start", **(told or {}), "is_given_plenty": is_given_plenty, "ran_out": ran_out}


def _confirmed(program: _Program, need: _Need) -> _Need:
    """What stalloc needs, found by running: the replay is exact for PyTorch's allocator, and may be a page off here."""
    least, page = need.needed_bytes, 2 << 20
    for size in (least, least + page, least + max(2 * page, least // 100)):
        if size >= need.taken_bytes:
            break
        if program.seen("stalloc", size).completes:
            return need.with_needed(size)
    return need.with_needed(min(need.taken_bytes, program.offered) if need.fits else need.taken_bytes)


def _uncertain(program: _Program, otherwise: Otherwise, plenty: RunSeen, need: _Need) -> dict[str, Any]:
    """What the native run could not know, with its figures for the least and the most that cuDNN may ask for."""
    uncertain = {"shared_blocks": None, **otherwise.findings_of(program.asked("native", PLENTY), plenty)}
    convolutions = uncertain["convolutions"]
    if convolutions["unknown_bytes"]:
        seen = [need]
        for which in ("least", "most"):
            one = program.seen("native", PLENTY, keep_history=True, workspaces=which)
            seen.append(_need(one, one, _replayed(one.traces, program.contenders["native"]), PLENTY))
        allocated = [one.allocated_peak_bytes for one in seen]
        convolutions["allocated_peak_bytes"] = [min(allocated), max(allocated)]
        # tries, and no range: in how many pieces memory is reserved may differ more with what lies between them
        convolutions["taken_bytes_tried"] = sorted({one.taken_bytes for one in seen})
        # the most is not needed: where memory is short PyTorch turns to other engines of cuDNN
        convolutions["needed_bytes_tried"] = sorted({one.needed_bytes for one in seen[:2]})
    return uncertain


def _print_needs(
    console: Console,
    result: dict[str, Any],
    needs: dict[str, _Need],
    offer: Offer,
    command: list[str],
    node: NodeMemory,
    whole_node: bool,
) -> None:
    console.print(offer.title())
    rows = []
    for key, need in needs.items():
        sizes = [human_bytes(getattr(need, figure)) for figure in _FIGURES]
        if key == "native" and not need.uses_torch and need.allocated_peak_bytes == 0:
            sizes[-1] = "not kept"  # CuPy's pool notes no peak
        rows.append([allocator_name(key, uses_torch=need.uses_torch), "yes" if need.fits else "no", *sizes])
    if offer.headroom_bytes:
        headroom = human_bytes(offer.headroom_bytes)
        rows.append(["CUDA context and NCCL", "", headroom, headroom, ""])
    print_table(console, ("", "fits", "needs", "takes given plenty", "allocated"), rows, text_columns=2, indent="  ")
    meant = "the least memory with which the program completes, found by replay, for stalloc by running it too"
    if any(need.needed_by == "reserved" for need in needs.values()):
        meant = "at most this much, which was reserved; nothing less was tried"
    print_lines(console, [f"needs: {meant}; takes: what is reserved when memory is plentiful"])
    if offer.headroom_bytes:
        print_lines(console, [f"CUDA context and NCCL: {offer.headroom_source}"])
    print_node(console, node, offer.headroom_bytes, whole=whole_node)
    if result["sleep"] is not None:
        print_sleep(console, result["sleep"], "under stalloc", human_bytes(offer.program_bytes))
    print_lines(console, last_lines(result))
    if result["uncertain"].get("taking_what_is_free"):
        console.print(f"next: {command_text('stalloc', 'dryrun', '--serve', *command)}")
    elif needs["stalloc"].fits:
        console.print(f"next: stalloc run {command_text(*command)} on the real GPU")
    else:
        words = command_text("stalloc", "fit", "--budget", size_text(offer.program_bytes), *command)
        console.print(f"next: {words}    (finds the cheapest way to make it fit)")
        console.print("  or: the same with a larger --gpu, or a smaller batch")
