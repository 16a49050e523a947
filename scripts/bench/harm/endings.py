"""Short programs with several kinds of steps, more of them at a time than there are processors: how they end.

Contract: a program that ends while plans are looked for, made or put in force ends with its own exit code.
"""

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from harm.catalogue import OWN, Program, programs
from harm.running import AMPLE_BYTES, Setting, last_line, variables_of, within_limit

_FILES = ("lasting", "lengths", "failures", "changing", "phases", "streams")
_MOST_STEPS = 30


@dataclass(frozen=True)
class Ending:
    command: str
    expected: int
    code: int
    said: str  #: the last line on standard error

    @property
    def is_own(self) -> bool:
        return self.code == self.expected


def endings(num_programs: int, seed: int, jobs: int) -> Iterator[Ending]:
    """Programs drawn at random, each with a random number of steps and an exit code of its own."""
    rng = random.Random(seed)
    own = [one for one in programs() if one.script.parent == OWN and one.script.stem in _FILES]
    drawn = [(rng.choice(own), rng.randrange(3, _MOST_STEPS), rng.choice([0, 0, 3])) for _ in range(num_programs)]
    with ThreadPoolExecutor(2 * jobs) as pool:
        yield from pool.map(lambda one: _end(*one), drawn)


def _end(program: Program, num_steps: int, code: int) -> Ending:
    command = [str(program.script), *program.arguments, str(num_steps), str(code)]
    variables = variables_of(program, Setting.STALLOC, AMPLE_BYTES)
    done = within_limit([sys.executable, *command], variables)
    return Ending(" ".join(command), code, done.returncode, last_line(done.stderr))
