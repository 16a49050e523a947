"""The smallest card of a catalogue on which a program completes, for each allocator.

Contract: cards are in the order of their memory. The program was run on the answer itself, with its number of
multiprocessors and its architecture, and completed; on the next smaller card it ran out, or what is live at a time is
clearly more than that card has.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from stalloc.device import VirtualGPU
from stalloc.device.known_gpus import PLENTY
from stalloc.lifespans import lower_bound
from stalloc.sizing.side_by_side import Asked, RunSeen
from stalloc.sizing.tries import Contender, Otherwise, Runner

_CLOSE = 0.9  # the least share of one card's need that another card needs: workspaces differ from card to card


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The smallest cards that are large enough, as indices; the number of cards if none is."""

    by_allocator: dict[str, int]
    seen: dict[tuple[str, int], RunSeen]  #: the runs by allocator and card
    needed_bytes: int | None  #: the most bytes live at a time, on the largest card; None if that is not known
    findings: dict[str, object]
    num_runs: int


def find_smallest(
    cards: Sequence[VirtualGPU], command: list[str], contenders: Sequence[Contender], run: Runner
) -> Smallest:
    """Try cards, the smallest first; `total_bytes` of each is what the program may have."""
    largest = dataclasses.replace(cards[-1], total_bytes=PLENTY)
    work = dataclasses.replace(contenders[0].work, gpu=largest, keep_history=True)
    without_limit = Asked(command=command, work=work, name="without a limit")
    (plenty,) = run([without_limit])
    otherwise = Otherwise(run)
    findings = otherwise.findings_of(without_limit, plenty)
    num_runs = 1
    needed = max((lower_bound(trace) for trace in plenty.traces), default=0) or None
    first = next((at for at, card in enumerate(cards) if card.total_bytes >= (needed or 0) * _CLOSE), len(cards))
    seen: dict[tuple[str, int], RunSeen] = {}
    answers: dict[str, int] = {}
    begun = {one.name: _guess(one, cards, plenty, first) for one in contenders}
    while wanted := _wanted(contenders, cards, seen, answers, begun, first):
        asked = [_on(cards[at], one, command) for one, at in wanted]
        num_runs += len(asked)
        for (one, at), result in zip(wanted, run(asked), strict=True):
            seen[one.name, at] = result
    if shared := findings.get("shared_blocks"):
        findings["order_decides"] = []
        for one in contenders:
            card = cards[at] if (at := answers[one.name]) < len(cards) else None
            if card is not None and shared["taken_bytes"] > card.total_bytes:
                told = otherwise.decides(one.name, _on(card, one, command), seen[one.name, at])
                findings["order_decides"] += [{**told, "of": card.name}] if told is not None else []
    num_runs += otherwise.num_runs
    return Smallest(by_allocator=answers, seen=seen, needed_bytes=needed, findings=findings, num_runs=num_runs)


def _on(card: VirtualGPU, one: Contender, command: list[str]) -> Asked:
    work = dataclasses.replace(one.work, gpu=card, name_holders=True)
    return Asked(command=command, work=work, name=f"{card.name}, {one.shown}")


def _guess(one: Contender, cards: Sequence[VirtualGPU], plenty: RunSeen, first: int) -> int:
    """The smallest card with the memory that a replay of the run on the largest one needs; else the first."""
    if not plenty.traces or one.candidate is None or not one.is_exact:
        return min(first, len(cards) - 1)
    from stalloc.replay.simulation import run_one

    for at in range(first, len(cards)):
        if all(run_one(trace, one.candidate, cards[at].total_bytes).fits for trace in plenty.traces):
            return at
    return len(cards) - 1


def _wanted(
    contenders: Sequence[Contender],
    cards: Sequence[VirtualGPU],
    seen: dict[tuple[str, int], RunSeen],
    answers: dict[str, int],
    begun: dict[str, int],
    first: int,
) -> list[tuple[Contender, int]]:
    """The next card of each allocator: up from where it began until one is large enough, then down until one is not."""
    wanted = []
    for one in contenders:
        if one.name in answers:
            continue
        known = {at: seen[one.name, at].completes for at in range(len(cards)) if (one.name, at) in seen}
        fitting = min((at for at, completes in known.items() if completes), default=len(cards))
        at = begun[one.name] if not known else fitting - 1 if fitting < len(cards) else max(known) + 1
        if at < first or at in known or at >= len(cards):
            answers[one.name] = fitting
        else:
            wanted.append((one, at))
    return wanted
