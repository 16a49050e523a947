"""Call sites: which stack asked for a request, each distinct stack and frame kept once, in five columns of Trace.extra.

docs/files.md describes the columns. Files are untrusted: what is kept is bounded, what is read back is checked, and
names hold printable characters only. A name may still hold markup: whoever shows it escapes it.
"""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.printable import printable
from stalloc.trace.record import Trace
from stalloc.trace.table_columns import DamagedTable, Rule, Rules, packed_list, unpacked_list

MAX_DEPTH = 512
MAX_TEXT = 1000
MAX_FRAMES, MAX_ENTRIES, MAX_CHARACTERS = 1 << 18, 1 << 23, 1 << 25
UNKNOWN = "unknown"

_COLUMNS = Rules(
    {
        "site": Rule("site", np.int32, "request", -1, "stacks"),
        "event_site": Rule("event_site", np.int32, "event", -1, "stacks"),
        "site_begin": Rule("begin", np.int64, "stack", 0, 1 << 62),
        "site_frame": Rule("frame", np.int32, "entry", 0, "frames"),
    }
)
_TEXT = "site_text"
_parts = operator.itemgetter("filename", "line", "name")


class Frame(NamedTuple):
    """One frame of a stack; C++ frames have the line 0 and no file, `??` or a C++ file."""

    filename: str
    line: int
    name: str


class StackCollector:
    """Gathers stacks while a source is read; equal stacks get one number."""

    def __init__(self) -> None:
        self._of_list: dict[int, int] = {}  # lists that several events share, by identity
        self._of_identities: dict[tuple[int, ...], int] = {}
        self._patience = 1000
        self._of_stack: dict[tuple[Any, ...], int] = {}
        self._frame: dict[Any, int] = {}
        self._frames: list[Frame] = []
        self._begin, self._entries = [0], list[int]()
        self._characters = 0

    def add(self, frames: Any) -> int:
        """The number of a stack, given as a list of {filename, line, name} that lives as long as this; -1 for none.

        A stack that is not well-formed, or that comes after the bounds are reached, is none; a deep one is cut.
        """
        if not frames or not isinstance(frames, list | tuple):
            return -1
        number = self._of_list.get(id(frames))
        if number is None:
            number = self._of_list[id(frames)] = self._find(frames[:MAX_DEPTH])
        return number

    def _find(self, frames: Any) -> int:
        """By the identities of the frames, as torch shares them among stacks; where that keeps failing, by content."""
        identities = tuple(map(id, frames)) if self._patience > 0 else ()
        number = self._of_identities.get(identities) if identities else None
        if number is not None:
            self._patience += 1
            return number
        try:
            stack = tuple(map(_parts, frames))
            number = self._of_stack.get(stack)
        except (KeyError, TypeError):
            return -1
        if number is None:
            number = self._of_stack[stack] = self._keep(stack)
        if identities:
            self._patience -= 1
            self._of_identities[identities] = number
        return number

    def _keep(self, stack: tuple[Any, ...]) -> int:
        if len(self._entries) + len(stack) > MAX_ENTRIES:
            return -1
        numbers = [self._number(parts) for parts in stack]
        if min(numbers) < 0:
            return -1
        self._entries += numbers
        self._begin.append(len(self._entries))
        return len(self._begin) - 2

    def _number(self, parts: Any) -> int:
        number = self._frame.get(parts)
        if number is None:
            filename, line, name = parts
            if not isinstance(filename, str) or not isinstance(name, str) or not isinstance(line, int):
                return -1
            frame = Frame(filename[-MAX_TEXT:], min(max(line, 0), 1 << 31), name[:MAX_TEXT])
            self._characters += len(frame.filename) + len(frame.name)
            if len(self._frames) >= MAX_FRAMES or self._characters > MAX_CHARACTERS:
                return -1
            number = self._frame[parts] = len(self._frames)
            self._frames.append(frame)
        return number

    def columns(self, site: Column, event_site: Column) -> dict[str, Column]:
        """What belongs into Trace.extra, given the stacks of the (n,) requests and (m,) events; nothing if all are -1.

        Only stacks and frames that these refer to are written, so that devices can share a collector.
        """
        used = np.unique(np.concatenate([site, event_site]).astype(np.int64))
        used = used[used >= 0]
        if not len(used):
            return {}
        renumbered = np.full(len(self._begin), -1, np.int32)
        renumbered[used] = np.arange(len(used))
        bounds = [(self._begin[number], self._begin[number + 1]) for number in used.tolist()]
        stacks = [np.array(self._entries[begin:end], np.int64) for begin, end in bounds]
        frames, entries = np.unique(np.concatenate(stacks), return_inverse=True)
        return {
            "site": renumbered[site],  # -1 picks the last entry, which no stack has
            "event_site": renumbered[event_site],
            "site_begin": np.cumsum([0, *map(len, stacks)], dtype=np.int64),
            "site_frame": entries.reshape(-1).astype(np.int32),
            "site_text": packed_list([self._frames[number] for number in frames.tolist()]),
        }


@dataclass(frozen=True, eq=False)
class Sites:
    site: Column  #: (n,) int32: stack of each request, or -1
    event_site: Column  #: (m,) int32: stack of each event, or -1
    begin: Column  #: (k+1,) int64: where each stack begins in `frame`
    frame: Column  #: (l,) int32: index into `frames`
    frames: tuple[Frame, ...]

    @property
    def num_stacks(self) -> int:
        return len(self.begin) - 1

    def stack(self, number: int) -> list[Frame]:
        """A stack, innermost frame first; empty for -1."""
        if number < 0:
            return []
        return [self.frames[index] for index in self.frame[self.begin[number] : self.begin[number + 1]].tolist()]


def read_sites(trace: Trace) -> Sites | None:
    """The call sites of a trace, None if it has none. Raises BadInputError if its tables contradict each other."""
    if not {*_COLUMNS, _TEXT} <= trace.extra.keys():
        return None
    try:
        listed = unpacked_list(trace.extra, _TEXT, MAX_FRAMES)
        frames = tuple(Frame(str(filename), int(line), str(name)) for filename, line, name in listed)
        found = Sites(**_COLUMNS.read(trace.extra), frames=frames)
        _COLUMNS.check(found, {"stacks": found.num_stacks, "frames": len(frames)})
        begin = found.begin
        if len(found.site) != trace.num_requests or len(found.event_site) != len(trace.action) or not len(begin):
            raise DamagedTable("its columns differ in length")
        if begin[0] != 0 or begin[-1] != len(found.frame) or np.any(np.diff(begin) <= 0):
            raise DamagedTable("its stacks are not side by side")
    except (DamagedTable, ValueError, TypeError, OverflowError) as error:
        raise BadInputError(
            f"trace of device {trace.device}: its table of call sites is damaged: convert or record it again."
        ) from error
    return found


T = TypeVar("T")


def of_stacks(
    trace: Trace, rows: Sequence[int] | npt.NDArray[Any], told: Callable[[list[Frame]], T], unknown: T
) -> list[T]:
    """What is told of the stack of each of these rows of a trace; `unknown` where it is not known."""
    sites = read_sites(trace)
    if sites is None:
        return [unknown] * len(rows)
    values = [*(told(sites.stack(number)) for number in range(sites.num_stacks)), unknown]  # -1 picks the last
    return [values[number] for number in sites.site[np.asarray(rows, np.int64)].tolist()]


def site_names(trace: Trace, rows: Sequence[int] | npt.NDArray[Any]) -> list[str]:
    """The name of the call site of each of these rows of a trace; `unknown` where it is not known."""
    return of_stacks(trace, rows, site_name, UNKNOWN)


def site_name(stack: Sequence[Frame], depth: int = 1) -> str:
    """A stack in a few words: its `depth` innermost frames that are worth showing, as `model.py:57 forward`."""
    shown = user_frames(stack)[:depth]
    return " from ".join(_frame_name(frame) for frame in shown) if shown else UNKNOWN


def user_frames(stack: Sequence[Frame]) -> list[Frame]:
    """The frames that tell whose memory it is, innermost first.

    Python frames outside torch and the standard library; where there are none, those inside torch; where there is no
    Python at all, as in the threads of autograd, the node of the backward pass, else the operator; none where only
    functions of stalloc stand between autograd and the allocator.
    """
    python = [frame for frame in stack if is_python(frame)]
    theirs = [frame for frame in python if not is_library(frame)]
    if theirs:
        return theirs
    if python and not any(_OURS.search(frame.filename) for frame in python):
        return python
    stack = [frame for frame in stack if not is_python(frame)]  # a thread of autograd, seen through our functions
    nodes = [frame for frame in stack if _NODE.search(frame.name)]
    if nodes:
        return nodes
    operators = [frame for frame in stack if frame.name.startswith(_OPERATORS) and "empty" not in frame.name]
    return operators or [frame for frame in stack if not frame.name.startswith(_ALLOCATOR)] or list(stack)


def is_python(frame: Frame) -> bool:
    """Whether a frame is one of Python, not of C++ or of the interpreter."""
    return frame.filename.endswith(".py") or frame.filename.startswith("<")


def is_library(frame: Frame) -> bool:
    """Whether a Python frame belongs to torch, its relatives, the standard library, or the verb that ran the program.

    Recordings may have lost their directories; then the names of torch's own files decide.
    """
    folder, _, base = frame.filename.rpartition("/")
    if frame.filename.startswith("<frozen") or frame.filename.startswith("<eval_with_key>"):
        return True
    if not folder:
        return bool(_TORCH_FILES.fullmatch(base))
    if "-packages/" in frame.filename:
        return bool(_LIBRARIES.search(frame.filename.rpartition("-packages")[2]) or _OURS.search(frame.filename))
    return bool(_STANDARD.search(frame.filename) or _OURS.search(frame.filename)) or "/torchinductor_" in frame.filename


_NODE = re.compile(r"(\w+)::apply\(")
_OPERATORS = ("at::_ops::", "at::native::")
_ALLOCATOR = ("torch::unwind", "torch::CapturedTraceback", "torch::cuda::(anonymous", "c10::cuda::", "at::detail::")
_LIBRARIES = re.compile(r"^/(torch|torch_npu|torchgen|functorch|triton|cupy|cupy_backends)/")
_STANDARD = re.compile(r"/(lib/python3(\.\d+)?|torch/(nn|cuda|utils|optim|autograd|_\w+|distributed))/")
_OURS = re.compile(
    r"/stalloc/((analysis|cli|compaction|core|cost|device|fitting|guard|integrations|lifespans|planner|poison|replay|"
    r"runtime|sandbox|sizing(?!/model_program)|sleeping|techniques|trace|writers)/(\w+/)*\w+|imports|lazy|__main__)\.py$"
)
_TORCH_FILES = re.compile(
    r"(module|functional|_tensor|_ops|container|conv|linear|batchnorm|normalization|pooling|activation|embedding|sparse|"
    r"dropout|upsampling|loss|_functions|function|graph|optimizer|adam|adamw|sgd|_contextlib|checkpoint|"
    r"checkpoint_wrapper|data_parallel|parallel_apply|replicate|comm|distributed|_fsdp_param|_fsdp_param_group|"
    r"_fsdp_state|_fsdp_collectives|eval_frame|convert_frame|symbolic_convert|output_graph|aot_autograd|"
    r"runtime_wrappers|output_code|compile_fx|triton_heuristics|benchmarking|constant_folding|joint_graph|interpreter|"
    r"vmap|apis|pyfunctorch|autograd_function|_jit_internal|storage|contextlib|threading|runpy)\.py"
)


def _frame_name(frame: Frame) -> str:
    if not is_python(frame):
        node = _NODE.search(frame.name)
        name = f"{node[1]} (autograd)" if node else frame.name.partition("(")[0] or frame.name
    else:
        name = f"{frame.filename.rpartition('/')[2]}:{frame.line} {frame.name}"
    return printable(name, 2 * MAX_TEXT)
