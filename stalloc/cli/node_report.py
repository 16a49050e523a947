"""What `stalloc dryrun` prints of the node: a line by default, with --node a table of every rank and the machine."""

from rich.console import Console

from stalloc.cli.tables import print_prose, print_table
from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.sizing.nccl_memory import Span
from stalloc.sizing.node import GroupMemory, NodeMemory, RankMemory

_MOST_SITES = 5
_PARTS = {"switch": "NVLink SHARP", "network": "shared by network peers"}


def span_text(span: Span) -> str:
    """The least and the most of a span as text; a single figure if both are equal."""
    least, most = human_bytes(span.least), human_bytes(span.most)
    return most if least == most else f"{least} to {most}"


def print_node(console: Console, node: NodeMemory, headroom_bytes: int, *, whole: bool) -> None:
    """Print what the node needs: one line, or the table of all of it."""
    if whole:
        _print_table(console, node)
    else:
        print_prose(console, _line(node), indent="  ")
    for line in _warnings(node, headroom_bytes):
        print_prose(console, line, indent="  ")


def _line(node: NodeMemory) -> str:
    """The host in short, and NCCL where it is used."""
    one = max(node.ranks, key=lambda rank: rank.host["pinned_bytes"] + rank.host["own_bytes"])
    who = "" if one.rank is None else f" of rank {one.rank}"
    parts = [_pinned_text(one), f"{human_bytes(one.host['own_bytes'])} of the program's own"]
    parts += [f"{span_text(one.shared_memory)} in /dev/shm"] if one.shared_memory.most else []
    text = f"on the host{who}: {', '.join(filter(None, parts))}"
    most = max(node.ranks, key=lambda rank: rank.nccl.most)
    if most.nccl.most:
        num = plural(len(most.groups), "communicator")
        text += f"; on the GPU: NCCL {span_text(most.nccl)} for {num}"
    return f"{text} (--node: all of it)"


def _pinned_text(one: RankMemory) -> str:
    pinned, asked = one.host["pinned_bytes"], one.host["pinned_asked_bytes"]
    text = f"{human_bytes(pinned)} pinned" if pinned else ""
    if pinned and asked is not None and asked != pinned:
        text += f" for {human_bytes(asked)} asked for"
    if one.host["registered_bytes"]:
        text += f"{', ' if text else ''}{human_bytes(one.host['registered_bytes'])} registered"
    return text


def _print_table(console: Console, node: NodeMemory) -> None:
    names = ["the program" if one.rank is None else f"rank {one.rank}" for one in node.ranks]
    rows = [
        _row("device: allocated", [human_bytes(one.allocated_bytes) for one in node.ranks]),
        _row("reserved", [human_bytes(one.reserved_bytes) for one in node.ranks]),
        _row("outside the allocator", [human_bytes(one.outside_bytes) for one in node.ranks]),
        _row("CUDA context", [_between(one.context.least_bytes, one.context.most_bytes) for one in node.ranks]),
        _row("NCCL", [span_text(one.nccl) for one in node.ranks]),
        _row("nvidia-smi shows", [span_text(one.nvidia_smi) for one in node.ranks]),
        _row("host: pinned", [human_bytes(one.host["pinned_bytes"]) for one in node.ranks], span_text(node.pinned)),
        _row("as asked for", [_asked(one) for one in node.ranks]),
        _row("by NCCL's proxies", [span_text(one.nccl_pinned) for one in node.ranks]),
        _host_row("registered", node, "registered_bytes"),
        _host_row("of the program's own", node, "own_bytes"),
        _row("/dev/shm", [span_text(one.shared_memory) for one in node.ranks], span_text(node.shared_memory)),
        _row("files", [""] * len(names), human_bytes(node.files_bytes)),
        _row("the cgroup grows by", [""] * len(names), span_text(node.cgroup)),
    ]
    machine = f"machine, {plural(node.num_local, 'rank')}"
    print_table(console, ("on the node", *names, machine), rows, indent="  ")
    for one in node.ranks:
        who = "" if one.rank is None else f"rank {one.rank}, "
        for group in one.groups:
            print_prose(console, f"{who}{_group_text(group)}", indent="  ")
        for name, size, asked in one.host["pinned_sites"][:_MOST_SITES]:
            wanted = "" if asked is None or asked == size else f" for {human_bytes(asked)} asked for"
            print_prose(console, f"{who}pinned at {printable(name)}: {human_bytes(size)}{wanted}", indent="  ")
    for line in _sources(node):
        print_prose(console, line, indent="  ")


def _row(name: str, cells: list[str], machine: str = "") -> list[str]:
    return [name, *cells, machine]


def _host_row(name: str, node: NodeMemory, figure: str) -> list[str]:
    return _row(name, [human_bytes(one.host[figure]) for one in node.ranks], human_bytes(node.host(figure)))


def _between(least: int, most: int) -> str:
    return span_text(Span(least=least, most=most))


def _asked(one: RankMemory) -> str:
    asked = one.host["pinned_asked_bytes"]
    return "not known" if asked is None else human_bytes(asked)


def _count(span: Span) -> str:
    return str(span.most) if span.least == span.most else f"{span.least} to {span.most}"


def _group_text(group: GroupMemory) -> str:
    used, memory = group.used, group.memory
    where = "" if used.num_nodes == 1 else f" on {used.num_nodes} machines"
    parts = ", ".join(f"{_PARTS.get(name, name)} {span_text(span)}" for name, span in memory.parts.items())
    return (
        f"NCCL, {plural(used.num_ranks, 'rank')}{where}, {_count(memory.channels.collective)} channels: "
        f"{parts or 'nothing on the GPU'}"
    )


def _sources(node: NodeMemory) -> list[str]:
    """How the figures are known, a sentence each."""
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
    missing = node.num_local - len(node.tried_here)
    if missing:
        lines.append(f"machine: {plural(missing, 'rank')} that were not tried are taken to be like the one with most")
    return lines


def _warnings(node: NodeMemory, headroom_bytes: int) -> list[str]:
    """Warnings of a headroom too small for NCCL, and of collectives that NCCL's figures do not include."""
    lines = []
    largest = max(node.ranks, key=lambda one: one.nccl.least + one.context.least_bytes)
    needed = largest.nccl.least + largest.context.least_bytes
    if largest.nccl.most and needed > headroom_bytes:
        lines.append(
            f"the CUDA context and NCCL take at least {human_bytes(needed)}, more than the "
            f"{human_bytes(headroom_bytes)} that are set aside: --headroom {-(-needed >> 20)}MiB"
        )
    others = sorted({name for one in node.ranks for name in one.outside_nccl})
    if others:
        lines.append(f"collectives outside of NCCL are not in its figures: {printable(', '.join(others))}")
    return lines
