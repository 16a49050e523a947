"""The phases of a program that sleeps, as a dry run prints them: what each takes, and which one runs out of memory."""

from typing import Any

from rich.console import Console

from stalloc.cli.tables import print_prose, print_table
from stalloc.figures import human_bytes
from stalloc.printable import printable
from stalloc.sizing.side_by_side import RunSeen


def seen_phases(plenty: RunSeen, card: RunSeen) -> dict[str, Any] | None:
    """Of two runs, the phases of that on the card where it completes, else of that with plenty; None without any.

    Where memory ran out on the card is told in either case.
    """
    is_given_plenty = not card.completes
    told, ran_out = (plenty if is_given_plenty else card).sleep, (card.sleep or {}).get("ran_out")
    if told is None and ran_out is None:
        return None
    return {"phases": [], "ended_in": "start", **(told or {}), "is_given_plenty": is_given_plenty, "ran_out": ran_out}


def print_sleep(console: Console, told: dict[str, Any], of: str, card: str) -> None:
    """Print the phases `of` an allocator, a row each, and where memory ran out on the card."""
    given = ", given plenty" if told["is_given_plenty"] else ""
    console.print(f"  from each sleep or wake to the next, {of}{given}:")
    rows = [
        [
            one["begins"],
            str(one["num_times"]),
            "" if one["allocated_peak_bytes"] is None else human_bytes(one["allocated_peak_bytes"]),
            human_bytes(one["held_peak_bytes"]),
            _sizes(one["asleep"]),
        ]
        for one in told["phases"]
    ]
    print_table(console, ("", "times", "allocated", "on the device", "asleep"), rows, indent="    ")
    if told["ran_out"] is not None:
        print_prose(console, ran_out_sentence(told["ran_out"], card), indent="  ")


def ran_out_sentence(ran_out: dict[str, Any], card: str) -> str:
    """Which phase ran out of memory, by how much, and what could make room."""
    wanted, free = (human_bytes(ran_out[name]) for name in ("wanted_bytes", "free_bytes"))
    missing, at = ran_out["wanted_bytes"] - ran_out["free_bytes"], printable(ran_out["at"])
    asks = f"waking {printable(ran_out['waking'])} ({at}) needs" if ran_out["waking"] else f"{at} asks for"
    lacks = f", {human_bytes(missing)} too few" if missing > 0 else ""
    return (
        f"with {card} memory runs out after `{printable(ran_out['phase'])}`: {asks} {wanted} when {free} are free"
        f"{lacks}; {_what_helps(ran_out, missing)}"
    )


def _what_helps(ran_out: dict[str, Any], missing: int) -> str:
    could = ran_out["could_sleep"]
    enough = {name: size for name, size in could.items() if size >= missing}
    if ran_out["cached_bytes"] >= missing > 0:
        return f"PyTorch caches {human_bytes(ran_out['cached_bytes'])}: call torch.cuda.empty_cache() before"
    if enough:
        return f"stalloc.sleep(tags=…) of {_sizes(enough, ' or ')} would make room"
    if sum(could.values()) >= missing and could:
        return f"stalloc.sleep(tags=…) of {_sizes(could, ' and ')} together would make room"
    return f"tags that are awake have too little: {_sizes(could)}" if could else "nothing that is awake has a tag"


def _sizes(sizes: dict[str, int], between: str = ", ") -> str:
    shown = [(printable(name), human_bytes(size)) for name, size in sizes.items()]
    return between.join(f"{name} {size}" if between == ", " else f"{name} ({size})" for name, size in shown)
