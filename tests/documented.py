"""Pages of docs/ as programs: the files they give, the commands they show, and whether an answer is what they show."""

import re


def commands(section: str) -> list[tuple[list[str], list[str]]]:
    """The words of each command, and the lines that follow it."""
    found: list[tuple[list[str], list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", section, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:].split(), []))
            else:
                found[-1][1].append(line)
    return found


def files(section: str) -> dict[str, str]:
    """The files whose content a page gives, by name."""
    return dict(re.findall(r"`(\S+)` holds[^\n]*:\n\n```\w+\n(.*?)```", section, re.DOTALL))


def answers(said: str, shown: list[str]) -> bool:
    """Whether what was said is what is shown, where a line `…` stands for any number of lines."""
    parts = [r"(?:.*\n)*?" if line == "…" else re.escape(line) + r"[ ]*\n" for line in shown]
    return re.fullmatch("".join(parts), said if said.endswith("\n") or not said else said + "\n") is not None
