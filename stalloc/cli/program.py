"""The user's program inside a verb: its command line, its device, running it as Python itself would."""

import argparse
import contextlib
import dataclasses
import itertools
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from stalloc import device as devices
from stalloc.cli.launchers import LAUNCHER_MODULES, LAUNCHERS, instead_of
from stalloc.device import VirtualGPU, find_gpu
from stalloc.device.deciding_lines import last_place, short_place
from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError, StallocError
from stalloc.figures import human_bytes
from stalloc.garbage import collect_for_program
from stalloc.notices import say

if TYPE_CHECKING:
    from stalloc.runtime import Runtime

_STAND_INS = os.path.dirname(os.path.abspath(devices.__file__)) + os.sep
_OF_VALUES = (ArithmeticError, AssertionError, LookupError, ValueError)  # errors that follow from a value
_USAGE = "give a script and its arguments, or -m MODULE and its arguments"


def add_program_arguments(
    parser: argparse.ArgumentParser, *, devices: tuple[str, ...] = ("auto", "cuda", "virtual")
) -> None:
    """Add the device options and SCRIPT [ARGS…] | -m MODULE [ARGS…]."""
    if len(devices) > 1:
        parser.add_argument(
            "--device", choices=devices, default=devices[0], help="auto (default): the real GPU where there is one"
        )
    parser.add_argument(
        "--gpu", metavar="NAME", help="the virtual GPU presents this model, for example H100 or A100-40GB"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="the virtual GPU has this much memory, for example 24GiB, whatever its model"
    )
    parser.add_argument(
        "--keep-files",
        action="store_true",
        help="on the virtual GPU too, write the program's files for real (they hold zeros, and replace what is there)",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module as python -m does"
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS…]", help="the program, with its arguments"
    )


def program_command(args: argparse.Namespace) -> list[str]:
    """What Python would be given: [SCRIPT, ARGS…] or [-m, MODULE, ARGS…]. Raises BadInputError if there is none."""
    verb = getattr(args, "verb", "run")
    if args.module is not None:
        if args.program:
            raise BadInputError(f"both a script and -m were given: {_USAGE}.")
        if not args.module:
            raise BadInputError(f"-m needs a module: {_USAGE}.")
        if args.module[0] in LAUNCHER_MODULES:
            raise BadInputError(instead_of(["python", "-m", *args.module], verb))
        return ["-m", *args.module]
    if args.program[:1] == ["--"]:  # what comes after it is no option
        del args.program[0]
    if not args.program:
        raise BadInputError(f"no program: {_USAGE}.")
    script = args.program[0]
    if script.startswith("-"):
        raise BadInputError(f"{script} is not an option of this verb: options of stalloc go before SCRIPT, see --help.")
    if Path(script).name in LAUNCHERS and not script.endswith(".py"):
        raise BadInputError(instead_of(args.program, verb))
    if not Path(script).exists():
        raise BadInputError(f"there is no file {script}: {_USAGE}.")
    if Path(script).is_dir():
        raise BadInputError(f"{script} is a folder, not a script: {_USAGE}.")
    return list(args.program)


def device_options(args: argparse.Namespace) -> list[str]:
    """The device options again, for a process of our own."""
    options = ["--device", args.device] if getattr(args, "device", None) else []
    if args.gpu:
        options += ["--gpu", args.gpu]
    if args.memory:
        options += ["--memory", args.memory]
    if args.keep_files:
        options += ["--keep-files"]
    return options


def chosen_gpu(args: argparse.Namespace) -> VirtualGPU | None:
    """The virtual GPU that the options describe, None for the default. Raises BadInputError for an unknown one."""
    model = find_gpu(args.gpu) if args.gpu else None
    if not args.memory:
        return model
    total = memory_option("--memory", args.memory)
    if model is None:
        return VirtualGPU(name=f"virtual GPU of {human_bytes(total)}", total_bytes=total)
    return dataclasses.replace(model, total_bytes=total)


class _Terminated(BaseException):
    """SIGTERM came."""


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends at once
    raise _Terminated


def run_program(command: list[str]) -> int:
    """Run a program in this process as Python would; its exit code, 1 after an exception (whose traceback is shown).

    SIGTERM ends the program like an exception, unless it handles it itself, so that what is known of it is reported.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)
    module = command[0] == "-m"
    sys.argv = command[1:] if module else list(command)
    collect_for_program()
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(command[0]).resolve().parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ending:
        if ending.code is None:
            return 0
        if isinstance(ending.code, int):
            return ending.code
        print(ending.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("the program was interrupted")
        return 128 + signal.SIGINT
    except _Terminated:
        say("the program was told to end (SIGTERM)")
        return 128 + signal.SIGTERM
    except BaseException as error:
        frames = error.__traceback__
        # the frames of this function and of runpy say nothing about the program
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            frames = frames.tb_next
        with contextlib.suppress(OSError, ValueError, AttributeError):  # what was printed comes before it
            sys.stdout.flush()
        _leave_out_ours(error)
        traceback.print_exception(type(error), error, _without_ours(frames))
        _say_what_was_read(error)
        return 1
    return 0


def run_served(command: list[str], start: Callable[[bool, bool], object]) -> tuple[int, "Runtime | None"]:
    """Run a program as `run_program` does, served from its first use of CUDA on; its exit code, and the runtime.

    `start` installs stalloc, for torch and for CuPy if it is told so. Until then the environment is the program's, and
    so are processes that it forks. An error of stalloc's ends the program, and is raised.
    """
    from stalloc.integrations.installing import current
    from stalloc.integrations.startup import start_at_first_use

    errors = start_at_first_use(start)
    code = run_program(command)
    if errors:
        raise errors[0]
    return code, current()


def _say_what_was_read(error: BaseException) -> None:
    """Name the line that read a value which the virtual GPU did not compute, if that may have led to an error."""
    place = last_place()
    if place is None or isinstance(error, MemoryError | StallocError) or "OutOfMemory" in type(error).__name__:
        return
    lines = {f"{one.f_code.co_filename}:{number}" for one, number in traceback.walk_tb(error.__traceback__)}
    if place in lines or isinstance(error, _OF_VALUES):
        say(
            f"{place} read a value that the virtual GPU does not compute, which may be why it failed: say what it "
            f"reads with stalloc dryrun --assume {short_place(place)}=1."
        )


def _without_ours(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the functions that stand in for torch's on the virtual GPU."""
    kept: list[TracebackType] = []
    while frames is not None:
        if not frames.tb_frame.f_code.co_filename.startswith(_STAND_INS):
            kept.append(frames)
        frames = frames.tb_next
    for one, after in itertools.pairwise([*kept, None]):
        if one is not None:
            one.tb_next = after
    return kept[0] if kept else None


def _leave_out_ours(error: BaseException) -> None:
    """Take those functions out of the tracebacks of the errors that led to `error`."""
    seen: set[int] = set()
    while (led := error.__cause__ or error.__context__) is not None and id(led) not in seen:
        seen.add(id(led))
        led.__traceback__, error = _without_ours(led.__traceback__), led


@contextlib.contextmanager
def program_output(*, to_stderr: bool) -> Iterator[None]:
    """Send what the program prints to standard error while standard output is kept for JSON."""
    if not to_stderr:
        yield
        sys.stdout.flush()
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
