"""The user's program inside a verb: its command line, its device, its files, running it as Python itself would."""

import argparse
import contextlib
import dataclasses
import itertools
import os
import re
import runpy
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from stalloc import device as devices
from stalloc.cli.output import write_json
from stalloc.device import VirtualGPU, find_gpu
from stalloc.device.deciding_lines import last_place, short_place
from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError, StallocError
from stalloc.figures import human_bytes
from stalloc.garbage import collect_for_program
from stalloc.notices import say
from stalloc.sandbox import ProgramFiles, SandboxedRun, way

if TYPE_CHECKING:
    from stalloc.runtime import Runtime

_STAND_INS = os.path.dirname(os.path.abspath(devices.__file__)) + os.sep
_OF_VALUES = (ArithmeticError, AssertionError, LookupError, ValueError)  # errors that follow from a value
_USAGE = "give a script and its arguments, or -m MODULE and its arguments"
_KEPT = "--keep-files: what the program writes is written for real, with the virtual GPU's zeros for values"
#: what starts programs in processes of their own, which stalloc serves, not their launchers
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "python", "python3")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_IN_ALL = {"num_processes", "np", "n", "ntasks"}  #: options that count the processes of every machine
_PROCESSES = _IN_ALL | {"nproc_per_node", "num_gpus", "ntasks_per_node"}
_MACHINES = {"nnodes", "num_machines", "num_nodes", "N", "nodes"}


def add_program_arguments(
    parser: argparse.ArgumentParser, *, devices: tuple[str, ...] = ("auto", "cuda", "virtual")
) -> None:
    """Add the device options and SCRIPT [ARGS…] | -m MODULE [ARGS…]."""
    add = parser.add_argument
    if len(devices) > 1:
        add("--device", choices=devices, default=devices[0], help="auto (default): the real GPU where there is one")
    add("--gpu", metavar="NAME", help="the virtual GPU presents this model, for example H100 or A100-40GB")
    add("--memory", metavar="SIZE", help="the virtual GPU has this much memory, for example 24GiB, whatever its model")
    add(
        "--keep-files",
        action="store_true",
        help="on the virtual GPU too, write the program's files for real (they hold zeros, and replace what is there)",
    )
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module as python -m does")
    add("program", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS…]", help="the program, with its arguments")


def program_command(args: argparse.Namespace) -> list[str]:
    """What Python would be given: [SCRIPT, ARGS…] or [-m, MODULE, ARGS…]. Raises BadInputError if there is none."""
    verb = getattr(args, "verb", "run")
    if args.module is not None:
        if args.program:
            raise BadInputError(f"both a script and -m were given: {_USAGE}.")
        if not args.module:
            raise BadInputError(f"-m needs a module: {_USAGE}.")
        if args.module[0] in _LAUNCHER_MODULES:
            raise BadInputError(_instead_of(["python", "-m", *args.module], verb))
        return ["-m", *args.module]
    if args.program[:1] == ["--"]:  # what comes after it is no option
        del args.program[0]
    if not args.program:
        raise BadInputError(f"no program: {_USAGE}.")
    script = args.program[0]
    if script.startswith("-"):
        raise BadInputError(f"{script} is not an option of this verb: options of stalloc go before SCRIPT, see --help.")
    if Path(script).name in _LAUNCHERS and not script.endswith(".py"):
        raise BadInputError(_instead_of(args.program, verb))
    if not Path(script).exists():
        raise BadInputError(f"there is no file {script}: {_USAGE}.")
    if Path(script).is_dir():
        raise BadInputError(f"{script} is a folder, not a script: {_USAGE}.")
    return list(args.program)


def _instead_of(command: list[str], verb: str) -> str:
    """What to type instead of a launcher, such as torchrun; N ranks where it leaves their number to the machine."""
    if command[0] in ("python", "python3") and "-m" not in command[:2]:
        return f"{command[0]} is what stalloc runs anyway: type stalloc {verb} {shlex.join(command[1:])}"
    launcher = command[2] if command[1:2] == ["-m"] else command[0]
    starts = f"{launcher} starts the program in processes of its own"
    program = _started(command[3 if command[1:2] == ["-m"] else 1 :])
    if verb != "dryrun" or not program:
        return f"{starts}: type STALLOC=1 {shlex.join(command)}"
    words = command[: len(command) - len(program)]
    return f"{starts}: type stalloc dryrun --ranks {_num_ranks(words)} {shlex.join(program)}"


def _started(words: list[str]) -> list[str]:
    for at, word in enumerate(words):
        if word in ("-m", "--module") and at + 1 < len(words):
            return ["-m", *words[at + 1 :]]
        if word.endswith(".py"):
            return words[at:]
    return []


def _num_ranks(words: list[str]) -> str:
    counts: dict[str, int] = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, _, given = word.partition("=")
        value = re.fullmatch(r"(?:\d+:)?(\d+)", given or after)
        if name.startswith("-") and value:
            counts[name.lstrip("-").replace("-", "_")] = int(value[1])
    of_each = next((name for name in counts if name in _PROCESSES), None)
    if of_each is None:
        return "N"
    machines = 1 if of_each in _IN_ALL else next((counts[name] for name in counts if name in _MACHINES), 1)
    return str(counts[of_each] * machines)


def device_options(args: argparse.Namespace) -> list[str]:
    """The device options again, for a process of our own."""
    given = {"--device": getattr(args, "device", None), "--gpu": args.gpu, "--memory": args.memory}
    options = [word for option, value in given.items() if value for word in (option, value)]
    return options + (["--keep-files"] if args.keep_files else [])


def chosen_gpu(args: argparse.Namespace) -> VirtualGPU | None:
    """The virtual GPU that the options describe, None for the default. Raises BadInputError for an unknown one."""
    model = find_gpu(args.gpu) if args.gpu else None
    if not args.memory:
        return model
    total = memory_option("--memory", args.memory)
    if model is None:
        return VirtualGPU(name=f"virtual GPU of {human_bytes(total)}", total_bytes=total)
    return dataclasses.replace(model, total_bytes=total)


def program_files(args: argparse.Namespace, command: Sequence[str]) -> ProgramFiles:
    """For a verb that runs a program many times on the virtual GPU, and discards what it writes."""
    files = ProgramFiles(command, keep=args.keep_files)
    _say_way(args, files)
    return files


def sandboxed_run(
    args: argparse.Namespace, command: Sequence[str], outputs: Iterable[str | None] = (), *, quiet: bool = False
) -> SandboxedRun | None:
    """For a verb that runs a program once, on the virtual GPU, in this process; None where writes are real.

    `outputs`: files that the verb itself writes while those of the program are in a sandbox. `quiet`: the process that
    started this one has said it already.
    """
    files = ProgramFiles(command, keep=args.keep_files)
    if not quiet:
        _say_way(args, files)
    return None if files.is_real else SandboxedRun(command, [one for one in outputs if one])


def _say_way(args: argparse.Namespace, files: ProgramFiles) -> None:
    if args.keep_files:
        say(_KEPT)
    elif not files.is_real and way().kind == "landlock":
        say(f"files: {way().sentence()}; --keep-files lets them through")


def outside_of_sandbox(args: argparse.Namespace, inside: SandboxedRun | None) -> int | None:
    """Report what a program told that has ended in its sandbox; its exit code. None in the process that runs it."""
    if inside is None or (ended := inside.fork(keep_new=True)) is None:
        return None
    for sentence in ended.files.sentences():
        say(sentence)
    if ended.told is not None:
        write_json(args, ended.told | {"files": ended.files.as_json()})
    return ended.finish()


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
        seen, led = {id(error)}, error.__cause__ or error.__context__
        while led is not None and id(led) not in seen:
            seen.add(id(led))
            led.__traceback__, led = _without_ours(led.__traceback__), led.__cause__ or led.__context__
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
