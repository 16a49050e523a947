"""What a run in which every block is computed again holds until backward, though the program as it is does not.

Contract: what was seen of the third step of the program is taken to hold for each step of the run.
"""

from stalloc.fitting.observation import ProgramSeen
from stalloc.fitting.run_seen import RunSeen


def unsaved_of(program: ProgramSeen) -> list[dict[int, tuple[int, ...]]]:
    """For each block, operations whose results are always kept when it is computed again, with what is saved anyway."""
    return [
        {place: one.saved for place, one in enumerate(block.operations) if one.is_lasting} for block in program.blocks
    ]


def gone_in(run: RunSeen, program: ProgramSeen) -> list[dict[int, int]]:
    """For each call of the run, places of inputs with the event by which the program as it is has let them go."""
    seen: dict[int, list[int]] = {}  # calls of each block in the program's step
    for number, call in enumerate(program.calls):
        seen.setdefault(call.block, []).append(number)
    counts: dict[int, int] = {}
    steps: dict[tuple[int, int], int] = {}  # call of the run, by step and call of the program's step
    where: list[tuple[int, int] | None] = []
    for number, recorded in enumerate(run.calls):
        count = counts[recorded.block] = counts.get(recorded.block, -1) + 1
        mine = seen.get(recorded.block, [])
        where.append((count // len(mine), mine[count % len(mine)]) if mine else None)
        if where[-1] is not None:
            steps[where[-1]] = number
    found: list[dict[int, int]] = []
    for place in where:
        found.append({})
        for inputs, by, is_end in program.calls[place[1]].unsaved if place is not None else ():
            other = steps.get((place[0], by)) if place is not None else None
            if other is not None and run.calls[other].forward:
                found[-1][inputs] = run.calls[other].forward[-1 if is_end else 0][int(is_end)]
    return found
