"""What dry runs print besides their own tables: doubts, phases of sleep, where memory ran out, and the node."""

from collections.abc import Callable
from typing import Any

from rich.console import Console

from stalloc.cli.tables import print_lines, print_prose, print_table
from stalloc.device.known_gpus import PLENTY
from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.sandbox import files_from_json
from stalloc.sizing.nccl_memory import Span
from stalloc.sizing.node import GroupMemory, NodeMemory, RankMemory
from stalloc.trace.sites import UNKNOWN

_SEEN_ABOVE = "8 %"  # SEW-ResNet18 on an RTX 4090: 14.21 GiB reserved, 13.17 with the largest workspaces
_SEEN_OFF = "up to 16 %"  # what other releases reserved, such as 15 % less for Qwen's image encoder (torch 2.7)
_MOST_PLACES, _MOST_HOLDERS, _MOST_SITES = 3, 3, 5  # of decisions, of memory and of pinned memory that are shown
_ALLOCATORS = {"native": "PyTorch", "expandable": "PyTorch, expandable_segments:True", "stalloc": "stalloc"}
_PARTS = {"switch": "NVLink SHARP", "network": "shared by network peers"}
_WHEN = {
    "at_once": "if all is done at once",
    "timeline": "on the timeline of estimated times",
    "at_waits": "if nothing is done before the host waits",
}


def allocator_name(name: str, *, uses_torch: bool = True) -> str:
    return _ALLOCATORS[name] if name != "native" or uses_torch else "CuPy's pool"


def ran_out_text(told: dict[str, Any]) -> str:
    """Where memory ran out and who held it, in a sentence; `told` is a `RanOut` as JSON."""
    holders = ", ".join(
        f"{human_bytes(size)} by {printable(name) if name != UNKNOWN else 'backward or others without a line'}"
        for name, size in told["holders"][:_MOST_HOLDERS]
    )
    return (
        f"{printable(told['place'])} asks for {human_bytes(told['wanted_bytes'])} when "
        f"{human_bytes(told['allocated_bytes'])} are allocated and {human_bytes(told['reserved_bytes'])} reserved"
        f"{f'; most is held: {holders}' if holders else ''}"
    )


def last_lines(result: dict[str, Any]) -> list[str]:
    """What follows every table of a dry run: what it cannot know, and what became of the program's files."""
    return [*_doubts(result["uncertain"]), *files_from_json(result["files"]).sentences()]


def _doubts(uncertain: dict[str, Any]) -> list[str]:
    lines = []
    convolutions, decisions = uncertain.get("convolutions", {}), uncertain.get("decisions", [])
    if taken := uncertain.get("taking_what_is_free"):
        lines.append(
            f"this program sizes itself by what is free: given {human_bytes(PLENTY)} it took {human_bytes(taken)}, and "
            "these figures say nothing of a card: use --serve"
        )
    if convolutions.get("unknown_bytes"):
        lines.append(
            f"cuDNN's workspace is a guess for {convolutions['num_unseen']} of {convolutions['num_convolutions']} "
            f"convolutions: {_of_guesses(convolutions)}"
        )
    if convolutions.get("by_trial"):
        lines.append(
            "torch.backends.cudnn.benchmark is on: on a GPU the quickest algorithms are found by trying them, and the "
            "workspaces of these trials, up to 4 GiB each, are not in these figures"
        )
    if uncertain.get("sleeps"):
        lines.append(
            "this program sleeps (stalloc.sleep), which PyTorch's allocators cannot: their figures are of a program "
            "that stays awake"
        )
    if shared := uncertain.get("shared_blocks"):
        of = f"at {shared['of']} " if "of" in shared else ""  # of a search, that of one value
        least, most = (
            f"{human_bytes(told['live_peak_bytes'])} are live and {human_bytes(told['taken_bytes'])} taken"
            for told in (shared, shared["timeline"])
        )
        lines.append(
            "several streams use blocks that are freed (record_stream), which a GPU gives back once all of them are "
            f"done: {of}{least} given plenty if none is before the host waits, at the most, and {most} on the timeline "
            "of estimated times"
        )
    lines += map(_what_order_decides, uncertain.get("order_decides", []))
    if decisions:
        shown = ", ".join(f"{printable(one['place'])} ({one['num_reads']})" for one in decisions[:_MOST_PLACES])
        more = f" and {len(decisions) - _MOST_PLACES} places more" if len(decisions) > _MOST_PLACES else ""
        num = sum(one["num_reads"] for one in decisions)
        lines.append(f"{num} decisions depended on values that the virtual GPU does not compute: {shown}{more}")
    if uncertain.get("torch"):
        of = f"for torch {uncertain['torch']} on this GPU"
        lines.append(f"{of}: with another release or card {_SEEN_OFF} less and more was seen")
    return lines


def _of_guesses(convolutions: dict[str, Any]) -> str:
    if "taken_bytes_tried" not in convolutions:  # a search runs no program at both ends of what cuDNN may ask for
        return (
            f"what is allocated may be {human_bytes(convolutions['unknown_bytes'])} off if cuDNN asks for no more "
            "than its table says, and what is reserved by more (a dry run of one says more)"
        )
    between = " to ".join(dict.fromkeys(map(human_bytes, convolutions["allocated_peak_bytes"])))
    needed, taken = (
        " or ".join(dict.fromkeys(map(human_bytes, convolutions[name])))
        for name in ("needed_bytes_tried", "taken_bytes_tried")
    )
    return (
        f"under PyTorch's own allocator the program allocates {between} if cuDNN asks for no more than its table says; "
        f"for guesses that were tried it needs {needed}, and takes {taken} given plenty, which bounds nothing: "
        f"{_SEEN_ABOVE} more was seen on a GPU"
    )


def _what_order_decides(one: dict[str, Any]) -> str:
    """A sentence on an error, or on retries, that depend only on the order in which the GPU finishes its work."""
    of, name = f"{one['of']}, " if "of" in one else "", one["allocator"]
    came = ", ".join(f"{_came_of(one[key])} {when}" for key, when in _WHEN.items())
    told = f"{of}{allocator_name(name)}: when the streams are done decides: the program {came}"
    if one["at_waits"]["fits"] or name == "stalloc":
        return f"{told}; a retry waits for the GPU and gives back what is cached: leave more memory, or wait sooner"
    return (
        f"{told}; PyTorch looks for a free block before it waits for streams and not again after "
        "(pytorch/pytorch#189504): keep references until the other stream is done in place of record_stream, or "
        "leave more memory"
    )


def _came_of(outcome: dict[str, Any]) -> str:
    if not outcome["fits"]:
        return "runs out of memory"
    num = outcome["num_retries"]
    return f"completes after {num} {'retries' if num > 1 else 'retry'}" if num else "completes without a retry"


def print_sleep(console: Console, told: dict[str, Any], of: str, card: str) -> None:
    """Print the phases `of` an allocator, a row each, and where memory ran out on the card."""
    given = ", given plenty" if told["is_given_plenty"] else ""
    console.print(f"  from each sleep or wake to the next, {of}{given}:")
    rows = []
    for one in told["phases"]:
        allocated = "" if one["allocated_peak_bytes"] is None else human_bytes(one["allocated_peak_bytes"])
        sizes = allocated, human_bytes(one["held_peak_bytes"])
        rows.append([one["begins"], str(one["num_times"]), *sizes, _sizes(one["asleep"])])
    print_table(console, ("", "times", "allocated", "on the device", "asleep"), rows, indent="    ")
    ran_out = told["ran_out"]
    if ran_out is None:
        return
    wanted, free = (human_bytes(ran_out[name]) for name in ("wanted_bytes", "free_bytes"))
    missing, at = ran_out["wanted_bytes"] - ran_out["free_bytes"], printable(ran_out["at"])
    asks = f"waking {printable(ran_out['waking'])} ({at}) needs" if ran_out["waking"] else f"{at} asks for"
    lacks = f", {human_bytes(missing)} too few" if missing > 0 else ""
    story = f"{asks} {wanted} when {free} are free{lacks}; {_what_helps(ran_out, missing)}"
    print_prose(console, f"with {card} memory runs out after `{printable(ran_out['phase'])}`: {story}", indent="  ")


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


def span_text(span: Span) -> str:
    """The least and the most of a span as text; a single figure if both are equal."""
    return " to ".join(dict.fromkeys((human_bytes(span.least), human_bytes(span.most))))


def print_node(console: Console, node: NodeMemory, headroom_bytes: int, *, whole: bool) -> None:
    """Print what the node needs: one line, or the table of every rank and the machine."""
    if whole:
        _print_table(console, node)
    else:
        print_prose(console, _line(node), indent="  ")
    largest = max(node.ranks, key=lambda one: one.nccl.least + one.context.least_bytes)
    needed = largest.nccl.least + largest.context.least_bytes
    if largest.nccl.most and needed > headroom_bytes:
        print_prose(
            console,
            f"the CUDA context and NCCL take at least {human_bytes(needed)}, more than the "
            f"{human_bytes(headroom_bytes)} that are set aside: --headroom {-(-needed >> 20)}MiB",
            indent="  ",
        )
    if others := sorted({name for one in node.ranks for name in one.outside_nccl}):
        print_lines(console, [f"collectives outside of NCCL are not in its figures: {printable(', '.join(others))}"])


def _line(node: NodeMemory) -> str:
    one = max(node.ranks, key=lambda rank: rank.host["pinned_bytes"] + rank.host["own_bytes"])
    who = "" if one.rank is None else f" of rank {one.rank}"
    pinned, asked, registered = (one.host[f"{name}_bytes"] for name in ("pinned", "pinned_asked", "registered"))
    more = f" for {human_bytes(asked)} asked for" if asked is not None and asked != pinned else ""
    parts = [f"{human_bytes(pinned)} pinned{more}" if pinned else ""]
    parts += [f"{human_bytes(registered)} registered"] if registered else []
    parts.append(f"{human_bytes(one.host['own_bytes'])} of the program's own")
    parts += [f"{span_text(one.shared_memory)} in /dev/shm"] if one.shared_memory.most else []
    text = f"on the host{who}: {', '.join(filter(None, parts))}"
    most = max(node.ranks, key=lambda rank: rank.nccl.most)
    if most.nccl.most:
        num = plural(len(most.groups), "communicator")
        text += f"; on the GPU: NCCL {span_text(most.nccl)} for {num}"
    return f"{text} (--node: all of it)"


def _print_table(console: Console, node: NodeMemory) -> None:
    def row(name: str, shown: Callable[[RankMemory], str], machine: str = "") -> list[str]:
        return [name, *map(shown, node.ranks), machine]

    def host_row(name: str, figure: str, machine: str = "") -> list[str]:
        return row(name, lambda one: human_bytes(one.host[figure]), machine or human_bytes(node.host(figure)))

    def asked(one: RankMemory) -> str:
        size = one.host["pinned_asked_bytes"]
        return "not known" if size is None else human_bytes(size)

    rows = [
        row("device: allocated", lambda one: human_bytes(one.allocated_bytes)),
        row("reserved", lambda one: human_bytes(one.reserved_bytes)),
        row("outside the allocator", lambda one: human_bytes(one.outside_bytes)),
        row("CUDA context", lambda one: span_text(Span(least=one.context.least_bytes, most=one.context.most_bytes))),
        row("NCCL", lambda one: span_text(one.nccl)),
        row("nvidia-smi shows", lambda one: span_text(one.nvidia_smi)),
        host_row("host: pinned", "pinned_bytes", span_text(node.pinned)),
        row("as asked for", asked),
        row("by NCCL's proxies", lambda one: span_text(one.nccl_pinned)),
        host_row("registered", "registered_bytes"),
        host_row("of the program's own", "own_bytes"),
        row("/dev/shm", lambda one: span_text(one.shared_memory), span_text(node.shared_memory)),
        row("files", lambda _: "", human_bytes(node.files_bytes)),
        row("the cgroup grows by", lambda _: "", span_text(node.cgroup)),
    ]
    names = ["the program" if one.rank is None else f"rank {one.rank}" for one in node.ranks]
    machine = f"machine, {plural(node.num_local, 'rank')}"
    print_table(console, ("on the node", *names, machine), rows, indent="  ")
    for one in node.ranks:
        who = "" if one.rank is None else f"rank {one.rank}, "
        print_lines(console, (f"{who}{_group_text(group)}" for group in one.groups))
        for name, size, wanted in one.host["pinned_sites"][:_MOST_SITES]:
            more = "" if wanted is None or wanted == size else f" for {human_bytes(wanted)} asked for"
            print_prose(console, f"{who}pinned at {printable(name)}: {human_bytes(size)}{more}", indent="  ")
    print_lines(console, _sources(node))


def _group_text(group: GroupMemory) -> str:
    used, channels = group.used, group.memory.channels.collective
    where = "" if used.num_nodes == 1 else f" on {used.num_nodes} machines"
    parts = ", ".join(f"{_PARTS.get(name, name)} {span_text(span)}" for name, span in group.memory.parts.items())
    count = " to ".join(dict.fromkeys((str(channels.least), str(channels.most))))
    return f"NCCL, {plural(used.num_ranks, 'rank')}{where}, {count} channels: {parts or 'nothing on the GPU'}"


def _sources(node: NodeMemory) -> list[str]:
    lines = [f"CUDA context: {node.ranks[0].context.source}"]
    if any(one.groups for one in node.ranks):
        lines.append(
            "NCCL: by its source (2.28.9) and the links of the card; from the least to the most where the machine or "
            "the driver decide; NCCL_ variables count as they are set here"
        )
    lines += [
        "pinned: what the driver was asked for, which is what torch.cuda.host_memory_stats() counts",
        "of the program's own: the peak of what was resident, less what was before it and what importing torch added",
        "the cgroup: at the most with pinned memory, libraries and files, as whether they are charged is not known "
        "here; what CUDA's libraries keep on the host is not in it",
    ]
    if missing := node.num_local - len(node.tried_here):
        lines.append(f"machine: {plural(missing, 'rank')} that were not tried are taken to be like the one with most")
    return lines
