"""Launchers, which start the user's program: what to type instead, as stalloc serves processes, not their launchers.

Contract: the number of processes is taken from the command, or is N where the command leaves it to the machine.
"""

import re
import shlex

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "python", "python3")
LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_PROCESSES = {
    "nproc_per_node", "num_processes", "num_gpus", "np", "n", "ntasks", "ntasks_per_node",
}  # fmt: skip
_MACHINES = {"nnodes", "num_machines", "num_nodes", "N", "nodes"}
_IN_ALL = {"num_processes", "np", "n", "ntasks"}  #: those that count the processes of every machine


def instead_of(command: list[str], verb: str) -> str:
    """What to type instead, for a verb that was given a launcher (such as torchrun) that starts the program."""
    if command[0] in ("python", "python3") and "-m" not in command[:2]:
        return f"{command[0]} is what stalloc runs anyway: type stalloc {verb} {shlex.join(command[1:])}"
    launcher = command[2] if command[1:2] == ["-m"] else command[0]
    starts = f"{launcher} starts the program in processes of its own"
    program = _started(command[3 if command[1:2] == ["-m"] else 1 :])
    if verb != "dryrun" or not program:
        return f"{starts}: type STALLOC=1 {shlex.join(command)}"
    return f"{starts}: type stalloc dryrun --ranks {_num_ranks(command)} {shlex.join(program)}"


def _started(words: list[str]) -> list[str]:
    """The program that a launcher starts, with its arguments: a script, or -m MODULE; empty if it is neither."""
    for at, word in enumerate(words):
        if word in ("-m", "--module") and at + 1 < len(words):
            return ["-m", *words[at + 1 :]]
        if word.endswith(".py"):
            return words[at:]
    return []


def _num_ranks(command: list[str]) -> str:
    started = _started(command)
    words = command[: len(command) - len(started)] if started else command
    if command[1:2] == ["-m"]:
        words = command[: len(command) - len(_started(command[3:]))]
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
