"""Settings of recomputation from the cheapest to the one that needs least.

Contract: every block may be left alone, or recomputed with the results of some operations kept; of those choices
the ones that save most bytes for a second come first (the convex hull of each block, then all blocks together, the
earlier ones first, as what they save is held longest).
"""

from bisect import bisect_left
from collections import Counter
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
    least = before.seconds if before else 0.0
    more = (one for one in _choices(step.blocks[row]) if one.kept_bytes > after.kept_bytes)
    finer = sorted((one for one in more if least < one.seconds < after.seconds), key=lambda choice: choice.seconds)
    return [proposal(step, {**thorough.choices, row: choice}) for choice in (*finer, after)]


def proposal(step: ProgramSeen, choices: Mapping[int, Choice]) -> Proposal:
    calls = _calls_of(step)
    return Proposal(choices, sum(choice.seconds * calls[row] for row, choice in choices.items()))


def whole_blocks(step: ProgramSeen, num_blocks: int | None = None) -> dict[int, Choice]:
    """The first `num_blocks` blocks, or all that can be recomputed, with nothing kept."""
    return {row: _choice(step.blocks[row], ()) for row in list(_calls_of(step))[:num_blocks]}


def keeping(step: ProgramSeen, names: tuple[str, ...]) -> dict[int, Choice]:
    """All blocks, with the results of operations kept whose names contain one of `names`."""
    choices = {}
    for row in _calls_of(step):
        block = step.blocks[row]
        kept = [i for i, one in enumerate(block.operations) if one.kept_bytes and any(n in one.name for n in names)]
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
        operations, core = step.blocks[row].operations, set[int]()
        products = [place for place, one in enumerate(operations) if "bmm" in one.name]
        for place in (place for place, one in enumerate(operations) if "softmax" in one.name):
            after = bisect_left(products, place)
            if 0 < after < len(products):
                core |= set(range(products[after - 1], products[after]))
        if core:
            kept = [
                place
                for place, one in enumerate(operations)
                if one.is_saved and one.kept_bytes and not one.is_random and not one.is_lasting and place not in core
            ]
            choices[row] = _choice(step.blocks[row], tuple(kept))
    return choices


def settings_of(step: ProgramSeen, choices: Mapping[int, Choice]) -> RecomputeSettings:
    """These choices, by the row of their block, as settings that can be applied."""
    blocks = []
    for row, choice in sorted(choices.items()):
        one = step.blocks[row]
        keep = tuple((place, one.operations[place].name) for place in choice.keep)
        blocks.append(BlockSettings(one.model, one.name, one.kind, keep))
    return RecomputeSettings(tuple(blocks))


def describe(step: ProgramSeen, proposed: Proposal) -> str:
    whole = sum(not choice.keep for choice in proposed.choices.values())
    num_blocks = len({call.block for call in step.calls})
    if whole == len(proposed.choices):
        return f"recompute {whole} of {plural(num_blocks, 'block')}"
    kept = sum(len(choice.keep) for choice in proposed.choices.values())
    blocks = [step.blocks[row] for row in proposed.choices]
    num = sum(one.seconds > 0 for block in blocks for one in block.operations[: block.num_needed])
    return f"recompute {num - kept} of {num} operations in {len(blocks)} of {num_blocks} blocks"


def _calls_of(step: ProgramSeen) -> Counter[int]:
    """How often each block that can be recomputed is called in a step."""
    return Counter(
        call.block for call in step.calls if not step.blocks[call.block].why_not and step.blocks[call.block].operations
    )


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
    needed = enumerate(block.operations[: block.num_needed])
    again = [one.seconds for place, one in needed if place not in keep and not one.is_lasting]
    kept = [block.operations[place] for place in keep] + [one for one in block.operations if one.is_lasting]
    return Choice(keep, sum(again), sum(one.kept_bytes for one in kept))


def _hull(choices: list[Choice], saved_bytes: int) -> list[Choice]:
    """The choices that save anything and that no mixture of others beats, from cheap to thorough."""
    points: list[tuple[float, int, Choice | None]] = [(0.0, 0, None)]

    def slope(to: tuple[float, int, Choice | None], since: int) -> float:
        return (to[1] - points[since][1]) / max(to[0] - points[since][0], 1e-12)

    for choice in sorted(choices, key=lambda one: (one.seconds, one.kept_bytes)):
        new = choice.seconds, saved_bytes - choice.kept_bytes, choice
        if new[1] <= points[-1][1]:
            continue
        while len(points) > 1 and slope(points[-1], -2) <= slope(new, -2):
            points.pop()
        points.append(new)
    return [choice for _, _, choice in points if choice is not None]
