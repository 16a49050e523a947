"""What `stalloc dryrun` prints: what is offered, what each allocator needs and takes, and what is not known."""

from dataclasses import dataclass, field
from typing import Any

from stalloc.cli.node_report import print_node
from stalloc.cli.output import command_text, size_text, table_console
from stalloc.cli.sleep_report import print_sleep
from stalloc.cli.tables import print_prose, print_table
from stalloc.device import VirtualGPU
from stalloc.device.known_gpus import ASSUMED_BYTES, CONTEXT_SOURCE, PLENTY, shown_with_memory
from stalloc.figures import human_bytes
from stalloc.printable import printable
from stalloc.sandbox import files_from_json
from stalloc.sizing.node import NodeMemory

_SEEN_ABOVE = "8 %"  # SEW-ResNet18 on an RTX 4090: 14.21 GiB reserved, 13.17 with the largest workspaces
_SEEN_OFF = "up to 16 %"  # what other releases reserved, such as 15 % less for Qwen's image encoder (torch 2.7)
_MOST_PLACES = 3  # of decisions, shown
_ALLOCATORS = {"native": "PyTorch", "expandable": "PyTorch, expandable_segments:True", "stalloc": "stalloc"}
FIGURES = ("needed_bytes", "taken_bytes", "allocated_peak_bytes")  #: of a Need, in the order of the table


@dataclass(frozen=True)
class Offer:
    """A card, and how much of its memory is for the program."""

    gpu: VirtualGPU
    headroom_bytes: int

    @property
    def program_bytes(self) -> int:
        """What the program may have."""
        return self.gpu.total_bytes - self.headroom_bytes

    @property
    def headroom_source(self) -> str:
        """Where the headroom is from."""
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
        """The first line of a report."""
        name = shown_with_memory("virtual", printable(self.gpu.name), self.gpu.total_bytes)
        headroom = human_bytes(self.headroom_bytes)
        kept = f", {headroom} for the CUDA context and NCCL" if self.headroom_bytes else ""
        return f"{name}: {human_bytes(self.program_bytes)} for the program{kept}"


@dataclass(frozen=True, kw_only=True)
class Need:
    """One allocator and the program, on the device that takes most."""

    fits: bool
    needed_bytes: int
    """The least memory in which the program completes."""
    needed_by: str
    """How that is known: "replay", "run" with no more than that, or "reserved": nothing less was tried."""
    taken_bytes: int
    """The reserved peak on a device with plenty of memory."""
    allocated_peak_bytes: int
    uses_torch: bool = field(default=True, repr=False)
    devices: dict[int, dict[str, int]] = field(default_factory=dict, repr=False)
    sleep: dict[str, Any] | None = field(default=None, repr=False)
    """Its phases, as `seen_phases` has them, where the program sleeps."""


def allocator_name(name: str, *, uses_torch: bool = True) -> str:
    """What people call an allocator of the dry run."""
    return _ALLOCATORS[name] if name != "native" or uses_torch else "CuPy's pool"


def print_needs(
    result: dict[str, Any],
    results: dict[str, Need],
    offer: Offer,
    command: list[str],
    node: NodeMemory,
    *,
    whole_node: bool,
) -> None:
    """Print the table of a dry run, what its words mean, and its doubts."""
    console, headroom = table_console(), human_bytes(offer.headroom_bytes)
    console.print(offer.title())
    rows = [
        [
            allocator_name(key, uses_torch=need.uses_torch),
            "yes" if need.fits else "no",
            *(_shown(getattr(need, figure), key, figure, need) for figure in FIGURES),
        ]
        for key, need in results.items()
    ]
    if offer.headroom_bytes:
        rows.append(["CUDA context and NCCL", "", headroom, headroom, ""])
    print_table(console, ("", "fits", "needs", "takes given plenty", "allocated"), rows, text_columns=2, indent="  ")
    if any(need.needed_by == "reserved" for need in results.values()):
        meant = "needs: at most this much, which was reserved; nothing less was tried"
    else:
        meant = (
            "needs: the least memory with which the program completes, found by replay, for stalloc by running it too"
        )
    print_prose(console, meant + "; takes: what is reserved when memory is plentiful", indent="  ")
    if offer.headroom_bytes:
        print_prose(console, f"CUDA context and NCCL: {offer.headroom_source}", indent="  ")
    print_node(console, node, offer.headroom_bytes, whole=whole_node)
    if result["sleep"] is not None:
        print_sleep(console, result["sleep"], "under stalloc", human_bytes(offer.program_bytes))
    for line in last_lines(result):
        print_prose(console, line, indent="  ")
    if result["uncertain"].get("taking_what_is_free"):
        console.print(f"next: {command_text('stalloc', 'dryrun', '--serve', *command)}")
    elif results["stalloc"].fits:
        console.print(f"next: stalloc run {command_text(*command)} on the real GPU")
    else:
        words = command_text("stalloc", "fit", "--budget", size_text(offer.program_bytes), *command)
        console.print(f"next: {words}    (finds the cheapest way to make it fit)")
        console.print("  or: the same with a larger --gpu, or a smaller batch")


def _shown(size_bytes: int, key: str, figure: str, need: Need) -> str:
    is_unknown = key == "native" and figure == "allocated_peak_bytes" and not need.uses_torch
    return "not kept" if is_unknown and size_bytes == 0 else human_bytes(size_bytes)  # CuPy's pool notes no peak


def _listed(sizes: list[int]) -> str:
    return " or ".join(dict.fromkeys(human_bytes(size) for size in sizes))


def _between(ends: list[int]) -> str:
    return " to ".join(dict.fromkeys(human_bytes(end) for end in ends))


def _held(told: dict[str, Any]) -> str:
    return f"{human_bytes(told['live_peak_bytes'])} are live and {human_bytes(told['taken_bytes'])} taken"


def _what_order_decides(one: dict[str, Any]) -> str:
    """A sentence on an error, or on retries, that depend only on the order in which the GPU finishes its work."""
    of, name = f"{one['of']}, " if "of" in one else "", one["allocator"]
    told = f"{of}{allocator_name(name)}: when the streams are done decides: the program " + ", ".join(
        f"{_came_of(one[key])} {when}" for key, when in _WHEN.items()
    )
    if not one["at_waits"]["fits"] and name != "stalloc":
        return (
            f"{told}; PyTorch looks for a free block before it waits for streams and not again after "
            "(pytorch/pytorch#189504): keep references until the other stream is done in place of record_stream, or "
            "leave more memory"
        )
    return f"{told}; a retry waits for the GPU and gives back what is cached: leave more memory, or wait sooner"


_WHEN = {
    "at_once": "if all is done at once",
    "timeline": "on the timeline of estimated times",
    "at_waits": "if nothing is done before the host waits",
}


def _came_of(outcome: dict[str, Any]) -> str:
    if not outcome["fits"]:
        return "runs out of memory"
    num = outcome["num_retries"]
    return f"completes after {num} {'retries' if num > 1 else 'retry'}" if num else "completes without a retry"


def last_lines(result: dict[str, Any]) -> list[str]:
    """What follows every table of a dry run: what it cannot know, and what became of the program's files."""
    return [*doubts(result["uncertain"]), *files_from_json(result["files"]).sentences()]


def doubts(uncertain: dict[str, Any]) -> list[str]:
    """What a dry run cannot know, a sentence each."""
    lines = []
    convolutions, decisions = uncertain.get("convolutions", {}), uncertain.get("decisions", [])
    if taken := uncertain.get("taking_what_is_free"):
        lines.append(
            f"this program sizes itself by what is free: given {human_bytes(PLENTY)} it took {human_bytes(taken)}, and "
            "these figures say nothing of a card: use --serve"
        )
    if convolutions.get("unknown_bytes"):
        if "taken_bytes_tried" in convolutions:
            found = (
                f"under PyTorch's own allocator the program allocates {_between(convolutions['allocated_peak_bytes'])} "
                f"if cuDNN asks for no more than its table says; for guesses that were tried it needs "
                f"{_listed(convolutions['needed_bytes_tried'])}, and takes "
                f"{_listed(convolutions['taken_bytes_tried'])} given plenty, which bounds nothing: {_SEEN_ABOVE} more "
                "was seen on a GPU"
            )
        else:  # a search does not run the program once more at both ends of what cuDNN may ask for
            found = (
                f"what is allocated may be {human_bytes(convolutions['unknown_bytes'])} off if cuDNN asks for no more "
                "than its table says, and what is reserved by more (a dry run of one says more)"
            )
        lines.append(
            f"cuDNN's workspace is a guess for {convolutions['num_unseen']} of {convolutions['num_convolutions']} "
            f"convolutions: {found}"
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
        lines.append(
            "several streams use blocks that are freed (record_stream), which a GPU gives back once all of them are "
            f"done: {of}{_held(shared)} given plenty if none is before the host waits, at the most, and "
            f"{_held(shared['timeline'])} on the timeline of estimated times"
        )
    lines += [_what_order_decides(one) for one in uncertain.get("order_decides", [])]
    if decisions:
        shown = ", ".join(f"{printable(one['place'])} ({one['num_reads']})" for one in decisions[:_MOST_PLACES])
        more = f" and {len(decisions) - _MOST_PLACES} places more" if len(decisions) > _MOST_PLACES else ""
        num = sum(one["num_reads"] for one in decisions)
        lines.append(f"{num} decisions depended on values that the virtual GPU does not compute: {shown}{more}")
    if uncertain.get("torch"):
        lines.append(
            f"for torch {uncertain['torch']} on this GPU: with another release or card {_SEEN_OFF} less and more was "
            "seen"
        )
    return lines
