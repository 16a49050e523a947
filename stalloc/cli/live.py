"""Show the GPU memory of a program while it runs: allocated, reserved, who holds most.

  stalloc live            the program that runs, or a list if there are several
  stalloc live PID

The program has to run under stalloc (`stalloc run`, STALLOC=1, stalloc.install()), or to call `stalloc.watch()` under
PyTorch's own allocator. Only a small file is read, which the program writes twice a second. On a terminal the picture
is redrawn until the program ends or Ctrl-C; elsewhere, and with --once, it is printed once.

JSON: what the program shows at this moment: `pid`, `command`, `began`, `time` (seconds since 1970), `holders` (device,
name, bytes, number of blocks), and for each of `devices` its bytes, `hit_rate`, `steps` and `step_ms`.
"""

import argparse
import contextlib
import os
import shlex
import time
from collections import deque
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from stalloc.cli.output import add_json_argument, present
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes, plural
from stalloc.live_file import live_folder, read_live, running_programs
from stalloc.printable import printable

_SECONDS = 0.5  # between two looks
_PATIENCE = 20  # looks in a row in which a program writes, or has only just begun
_BARS = "▁▂▃▄▅▆▇█"
_MAX_POINTS = 60
_WIDTH = 30  # of a bar: the memory of the device
_HOW = "with `stalloc run` or STALLOC=1, or let it call stalloc.watch()"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pid", nargs="?", type=int, metavar="PID", help="the program's process")
    parser.add_argument("--once", action="store_true", help="print what it shows now, and end")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    pid = _chosen(args.pid)
    figures = _read(pid)
    if figures is None:
        raise BadInputError(f"process {pid} has ended, or shows nothing yet: try again.")
    present(args, figures, _show, args.once, pid, figures)
    return 0


def _chosen(pid: int | None) -> int:
    """The process that is meant. Raises BadInputError if it shows nothing, or several do and none was named."""
    found = running_programs()
    if pid in found:
        return int(pid)
    if pid is not None:
        raise BadInputError(f"process {pid} shows no memory: start it {_HOW}.")
    if not found:
        raise BadInputError(f"no program of yours shows its memory: start one {_HOW}.")
    if len(found) == 1:
        return found[0]
    names = "; ".join(f"{one} {_command(_read(one) or {})}" for one in found)
    raise BadInputError(f"{plural(len(found), 'program')} show their memory, name one of them: {names}.")


def _read(pid: int) -> dict[str, Any] | None:
    """What a program shows; waits while it writes. None once it has ended."""
    for _ in range(_PATIENCE):
        figures = read_live(live_folder() / f"{pid}.live")
        if figures:
            return figures
        if pid not in running_programs():
            break
        time.sleep(0.1)
    return None


def _show(console: Console, once: bool, pid: int, figures: dict[str, Any] | None) -> None:
    """Draw what the program shows; on a terminal anew until it ends."""
    if figures is not None and (once or not console.is_terminal):
        console.print(_picture(figures, {}), soft_wrap=True)
        return
    seen: dict[int, deque[int]] = {}
    with contextlib.suppress(KeyboardInterrupt):
        with Live(console=console, auto_refresh=False, transient=False) as screen:
            while figures is not None:
                for entry in _devices(figures):
                    points = seen.setdefault(_number(entry, "device"), deque(maxlen=_MAX_POINTS))
                    points.append(_number(entry, "allocated_bytes"))
                screen.update(_picture(figures, seen), refresh=True)
                time.sleep(_SECONDS)
                figures = _read(pid)
        console.print("the program has ended")


def _picture(figures: dict[str, Any], seen: dict[int, "deque[int]"]) -> Group:
    lines = [Text.assemble((f"{_number(figures, 'pid')} ", "bold"), _command(figures))]
    devices = _devices(figures)
    if not devices:
        lines.append(Text("no GPU memory so far"))
    for entry in devices:
        lines += _device_lines(entry, seen.get(_number(entry, "device"), deque()))
    held = [row for row in figures.get("holders", []) if isinstance(row, list) and len(row) == 4]
    if held:
        lines.append(Text("most is held by", style="bold"))
    for _, name, size, count in held:
        lines.append(Text(f"  {human_bytes(int(size)):>10}  {plural(int(count), 'block')} of {printable(str(name))}"))
    for line in lines:  # a picture is as wide as the terminal, whatever a name or a command is
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def _device_lines(entry: dict[str, Any], points: "deque[int]") -> list[Text]:
    number = _number(entry, "device")
    errors = _number(entry, "out_of_memory_errors")
    parts = [
        str(entry.get("allocator", "")),
        str(entry.get("phase", "")),
        f"step {_number(entry, 'steps'):,}" if entry.get("steps") else "",
        f"{float(entry['step_ms']):,.1f} ms a step" if entry.get("step_ms") else "",
        f"{float(entry['hit_rate']):.1%} served from the plan" if entry.get("hit_rate") is not None else "",
        plural(errors, "out-of-memory error") if errors else "",
    ]
    told = printable(", ".join(filter(None, parts)))
    total = _number(entry, "total_bytes")
    lines = [Text(f"device {number}: {printable(str(entry.get('name', '')))}, {human_bytes(total)}; {told}")]
    for name in ("allocated", "reserved"):
        now, peak = _number(entry, f"{name}_bytes"), _number(entry, f"{name}_peak_bytes")
        filled = min(-(-_WIDTH * now // total), _WIDTH) if total else 0
        bar = "█" * filled + "·" * (_WIDTH - filled)
        lines.append(Text(f"  {name:<9} {human_bytes(now):>10}  {bar}  peak {human_bytes(peak)}"))
    if len(points) > 1:
        most = max(max(points), 1)
        lines.append(Text("  " + "".join(_BARS[min(point * len(_BARS) // most, len(_BARS) - 1)] for point in points)))
    return lines


def _devices(figures: dict[str, Any]) -> list[dict[str, Any]]:
    told = figures.get("devices", [])
    return [entry for entry in told if isinstance(entry, dict)] if isinstance(told, list) else []


def _number(entry: dict[str, Any], name: str) -> int:
    value = entry.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


def _command(figures: dict[str, Any]) -> str:
    words = figures.get("command", [])
    if not isinstance(words, list) or not words:
        return ""
    return printable(shlex.join([os.path.basename(str(words[0])), *map(str, words[1:])]))
