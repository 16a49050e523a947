"""Whether the streams of a program keep apart in a plan: by bytes of their own, or by handovers that are listed.

Contract: as of validator.py, of which this is a part.
"""

from bisect import bisect_left, bisect_right

from stalloc.planner.plan_record import Plan
from stalloc.planner.verdict import Verdict, uses_of_schedule


def check_streams(*plans: Plan) -> Verdict:
    """Whether two streams have bytes in common, at whatever time, in plans of one arena."""
    columns = [
        (plan.schedule_offset.tolist(), plan.schedule_size.tolist(), plan.schedule_stream.tolist()) for plan in plans
    ]
    if len({stream for _, _, streams in columns for stream in streams}) == 1:
        return Verdict(True)
    rows = [(row, *entry) for entries in columns for row, entry in enumerate(zip(*entries, strict=True))]
    spaces = sorted((low, low + size, stream, row) for row, low, size, stream in rows if low >= 0 < size)
    furthest, reacher, owner = 0, -1, -1  # the furthest byte so far, the entry that reaches it and its stream
    for low, high, stream, row in spaces:
        if furthest > low and owner != stream:
            return Verdict(
                False,
                "shared-by-streams",
                f"schedule entries {reacher} and {row} of streams {owner} and {stream} share bytes from {low}",
            )
        if high > furthest:
            furthest, reacher, owner = high, row, stream
    return Verdict(True)


def check_handovers(plan: Plan) -> Verdict:
    """Whether every byte that passes from one stream to another does so by a listed handover, and no other is listed.

    Looks at who used each byte last, over prologue and two iterations; what follows is like the second.
    """
    count = len(plan.schedule_size)
    listed = set(zip(plan.handover_earlier.tolist(), plan.handover_later.tolist(), strict=True))
    if any(not (0 <= one < count and 0 <= two < count) for one, two in listed):
        return Verdict(False, "bad-handover", f"a handover names a schedule entry that is none of {count}")
    stream = plan.schedule_stream.tolist()
    seen: set[tuple[int, int]] = set()
    last: list[tuple[int, int, int]] = []  # bytes [low, high) and the entry that used them last, by address
    for _, _, low, high, user in uses_of_schedule(plan).lasting().by_start().tuples():
        first = bisect_right(last, low, key=lambda piece: piece[1])  # the first that ends above its low
        beyond = bisect_left(last, high, key=lambda piece: piece[0])  # the first that begins at its high or above
        pieces = [(low, high, user)]
        for begin, end, row in last[first:beyond]:
            if stream[row] != stream[user]:
                seen.add((row, user))
            pieces += [piece for piece in ((begin, low, row), (high, end, row)) if piece[0] < piece[1]]
        last[first:beyond] = sorted(pieces)
    for one, two in sorted(seen ^ listed):
        if (one, two) in seen:
            return Verdict(
                False,
                "shared-by-streams",
                f"schedule entry {two} of stream {stream[two]} takes bytes of entry {one} of stream {stream[one]} "
                f"without a handover",
            )
        return Verdict(False, "bad-handover", f"schedule entry {two} takes over no bytes of entry {one}")
    return Verdict(True)
