"""How the programs of this folder are started, and where they say that a step is over.

Contract: a program knows nothing of stalloc. `end_of_step` does nothing but call who listens, which is nobody unless
scripts/bench/no_harm runs the program.
"""

import sys
from collections.abc import Callable, Iterator

Program = Callable[[int], None]

listeners: list[Callable[[str], None]] = []
_programs: dict[str, tuple[Program, int]] = {}


def program(num_steps: int) -> Callable[[Program], Program]:
    """Makes a function of a number of steps a program of its file; `num_steps` is how many it runs by default."""

    def add(function: Program) -> Program:
        _programs[function.__name__] = function, num_steps
        return function

    return add


def end_of_step(kind: str = "") -> None:
    """A step is over; `kind` names it where the number of its requests and their bytes would not."""
    for listener in listeners:
        listener(kind)


def each_step(num_steps: int, kind: str = "") -> Iterator[int]:
    """The numbers of steps, each of which is over when the next one is asked for."""
    for step in range(num_steps):
        yield step
        end_of_step(kind)


def run() -> None:
    """Run the program that the command line names: python FILE NAME [STEPS [EXIT CODE]]."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in _programs:
        sys.exit(f"give one of: {', '.join(_programs)}, and a number of steps if you like.")
    function, num_steps = _programs[name]
    function(int(sys.argv[2]) if len(sys.argv) > 2 else num_steps)
    if len(sys.argv) > 3:
        sys.exit(int(sys.argv[3]))
