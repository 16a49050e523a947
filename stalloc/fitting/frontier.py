"""Settings of recomputation from the cheapest to the one that needs least.

Contract: every block may be left alone, or recomputed with the results of some operations kept; of those choices
the ones that save most bytes for a second come first (the convex hull of each block, then all blocks together, the
earlier ones first, as what they save is held longest).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stalloc.figures import plural
from stalloc.fitting.observation import BlockSeen, ProgramSeen
from stalloc.techniques.recompute_settings import BlockSettings, RecomputeSettings


@dataclass(frozen=True)
class Choice:
    keep: tuple[int, ...]  #: positions of operations whose results are kept
    seconds: float  #: by which a call becomes longer, estimated
    kept_bytes: int


@dataclass(frozen=True)
class Proposal:
    choices: Mapping[int, Choice]  #: by row of the block; other blocks stay as they are
    seconds: float  #: by which a step becomes longer, estimated

    @property
    def kept(self) -> dict[int, tuple[int, ...]]:
        return {row: choice.keep for row, choice in self.choices.items()}


def frontier(step: ProgramSeen) -> list[Proposal]:
    """Proposals by rising cost; the first is the program as it is, the last recomputes whatever pays."""
    calls = _calls_of(step)
    chosen: dict[int, Choice] = {}
    found = [proposal(step, chosen)]
    increments = []
    for row, num_calls in calls.items():
        saved = max(call.saved_bytes for call in step.calls if call.block == row)
        hull = _hull(_choices(step.blocks[row]), saved)
        for number, (before, after) in enumerate(zip([None, *hull], hull, strict=False)):
            gained = (saved if before is None else before.kept_bytes) - after.kept_bytes
            longer = after.seconds - (before.seconds if before else 0.0)
            increments.append((-gained / max(longer, 1e-12), number, row, after, num_calls))
    for *_, row, after, _ in sorted(increments, key=lambda one: (one[0], one[1], one[2])):
        chosen = {**chosen, row: after}
        found.append(proposal(step, chosen))
    return found


def between(step: ProgramSeen, cheap: Proposal, thorough: Proposal) -> list[Proposal]:
    """Proposals by rising cost from one of the frontier to the next, in which more is recomputed of one block: the
    choices of that block which the hull leaves out, as others give more bytes for a second; the last is the next one.
    """
    changed = [row for row, choice in thorough.choices.items() if cheap.choices.get(row) != choice]
    if len(changed) != 1:
        return [thorough]
    row, before = changed[0], cheap.choices.get(changed[0])
    after = thorough.choices[row]
    found = [
        choice
        for choice in _choices(step.blocks[row])
        if after.kept_bytes < choice.kept_bytes and (before.seconds if before else 0.0) < choice.seconds < after.seconds
    ]
    ordered = sorted(found, key=lambda choice: choice.seconds)
    return [proposal(step, {**thorough.choices, row: choice}) for choice in (*ordered, after)]


def proposal(step: ProgramSeen, choices: Mapping[int, Choice]) -> Proposal:
    calls = _calls_of(step)
    return Proposal(choices, sum(choice.seconds * calls.get(row, 0) for row, choice in choices.items()))


def whole_blocks(step: ProgramSeen, num_blocks: int | None = None) -> dict[int, Choice]:
    """The first `num_blocks` blocks, or all that can be recomputed, with nothing kept."""
    rows = [row for row in _calls_of(step) if step.blocks[row].operations]
    return {row: _choice(step.blocks[row], ()) for row in rows[:num_blocks]}


def keeping(step: ProgramSeen, names: tuple[str, ...]) -> dict[int, Choice]:
    """All blocks, with the results of operations kept whose names contain one of `names`."""
    choices = {}
    for row in _calls_of(step):
        block = step.blocks[row]
        kept = [
            i for i, one in enumerate(block.operations) if one.kept_bytes and any(name in one.name for name in names)
        ]
        # random numbers are drawn again with all that were drawn before them, which cannot be kept then
        drawn_again = [i for i, one in enumerate(block.operations) if one.is_random and i not in kept]
        kept = [i for i in kept if not block.operations[i].is_random or i > max(drawn_again, default=-1)]
        if kept:
            choices[row] = _choice(block, tuple(kept))
    return choices


def selective(step: ProgramSeen) -> dict[int, Choice]:
    """All blocks with attention written out (Korthikanti et al. 2022, section 5): what autograd saves is kept, but for
    the core of attention, from the product of queries and keys up to the product with the values, and for what is
    drawn at random, which is drawn again."""
    choices = {}
    for row in _calls_of(step):
        block = step.blocks[row]
        core = _cores(block)
        if core:
            kept = [
                place
                for place, one in enumerate(block.operations)
                if one.is_saved and one.kept_bytes and not one.is_random and not one.is_lasting and place not in core
            ]
            choices[row] = _choice(block, tuple(kept))
    return choices


def _cores(block: BlockSeen) -> set[int]:
    """Positions from the product before each softmax up to the product after it."""
    names = [one.name for one in block.operations]
    products = [place for place, name in enumerate(names) if "bmm" in name]
    found: set[int] = set()
    for place, name in enumerate(names):
        before = [one for one in products if one < place]
        after = [one for one in products if one > place]
        if "softmax" in name and before and after:
            found |= set(range(before[-1], after[0]))
    return found


def settings_of(step: ProgramSeen, choices: Mapping[int, Choice]) -> RecomputeSettings:
    """These choices, by the row of their block, as settings that can be applied."""
    blocks = [(step.blocks[row], choice) for row, choice in sorted(choices.items())]
    return RecomputeSettings(
        tuple(
            BlockSettings(
                block.model, block.name, block.kind, tuple((i, block.operations[i].name) for i in choice.keep)
            )
            for block, choice in blocks
        )
    )


def describe(step: ProgramSeen, proposed: Proposal) -> str:
    whole = sum(not choice.keep for choice in proposed.choices.values())
    num_blocks = len({call.block for call in step.calls})
    if whole == len(proposed.choices):
        return f"recompute {whole} of {plural(num_blocks, 'block')}"
    kept = sum(len(choice.keep) for choice in proposed.choices.values())
    all_operations = sum(
        sum(one.seconds > 0 for one in step.blocks[row].operations[: step.blocks[row].num_needed])
        for row in proposed.choices
    )
    num_again = all_operations - kept
    return f"recompute {num_again} of {all_operations} operations in {len(proposed.choices)} of {num_blocks} blocks"


def _calls_of(step: ProgramSeen) -> dict[int, int]:
    counts: dict[int, int] = {}
    for call in step.calls:
        if not step.blocks[call.block].why_not and step.blocks[call.block].operations:
            counts[call.block] = counts.get(call.block, 0) + 1
    return counts


def _choices(block: BlockSeen) -> list[Choice]:
    """Choices from nothing kept to everything kept; what saves most seconds for a byte is kept first."""
    worth = [
        (one.seconds / one.kept_bytes, place)
        for place, one in enumerate(block.operations[: block.num_needed])
        if one.kept_bytes and one.seconds and not one.is_lasting and not one.is_random
    ]
    order = [place for _, place in sorted(worth, key=lambda one: (-one[0], one[1]))]
    return [_choice(block, tuple(sorted(order[:count]))) for count in range(len(order) + 1)]


def _choice(block: BlockSeen, keep: tuple[int, ...]) -> Choice:
    lasting = [one for one in block.operations if one.is_lasting]
    again = [
        one.seconds
        for place, one in enumerate(block.operations[: block.num_needed])
        if place not in keep and not one.is_lasting
    ]
    kept_bytes = sum(block.operations[place].kept_bytes for place in keep) + sum(one.kept_bytes for one in lasting)
    return Choice(keep, sum(again), kept_bytes)


def _hull(choices: list[Choice], saved_bytes: int) -> list[Choice]:
    """The choices that save anything and that no mixture of others beats, from cheap to thorough."""
    points: list[tuple[float, int, Choice | None]] = [(0.0, 0, None)]
    for choice in sorted(choices, key=lambda one: (one.seconds, one.kept_bytes)):
        gained = saved_bytes - choice.kept_bytes
        if gained <= points[-1][1]:
            continue
        while len(points) > 1 and _slope(points[-2], points[-1]) <= _slope(
            points[-2], (choice.seconds, gained, choice)
        ):
            points.pop()
        points.append((choice.seconds, gained, choice))
    return [choice for _, _, choice in points if choice is not None]


def _slope(one: tuple[float, int, Choice | None], other: tuple[float, int, Choice | None]) -> float:
    return (other[1] - one[1]) / max(other[0] - one[0], 1e-12)
