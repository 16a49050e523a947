"""Pages as programs: the files they give, the commands they show, and whether an answer is what they show."""

import re
import shlex


def commands(section: str) -> list[tuple[list[str], list[str]]]:
    """The words of each command that is shown with its answer, and the lines that follow it."""
    found: list[tuple[list[str], list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", section, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((shlex.split(line[2:]), []))
            else:
                found[-1][1].append(line)
    return found


def typed(page: str) -> list[list[str]]:
    """The verb and the options of each command of stalloc, in blocks and in the text; a script's own are left out."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    lines += re.findall(r"^\$ (.*)$", page, re.MULTILINE)
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    lines += [" ".join(text.split()) for text in re.findall(r"`(stalloc [^`]+)`", prose)]
    found = []
    for line in lines:
        for match in re.finditer(r"(?:^|[;|&] ?|[A-Z]=\S+ )stalloc ([a-z]+)( [^;|&#]*)?", line.strip()):
            own = re.split(r" -m | \S+\.py\b| SCRIPT| -- ", match[2] or "")[0]
            found.append([match[1], *re.findall(r"--[\w-]+", own)])
    return found


def files(section: str) -> dict[str, str]:
    """The files whose content a page gives, by name."""
    return dict(re.findall(r"`(\S+)` holds[^\n]*:\n\n```\w+\n(.*?)```", section, re.DOTALL))


def answers(said: str, shown: list[str]) -> bool:
    """Whether what was said is what is shown; `…` stands for any lines, and at the end of a line for the rest of it.

    Milliseconds are those of the machine.
    """
    parts = [r"(?:.*\n)*?" if line == "…" else _pattern(line.rstrip()) + r"[ ]*\n" for line in shown]
    return re.fullmatch("".join(parts), said if said.endswith("\n") or not said else said + "\n") is not None


def _pattern(line: str) -> str:
    text = re.escape(line.removesuffix("…"))
    return re.sub(r"(\\ )+[\d\\.]+\\ ms", r" +[\\d.]+ ms", text) + ".*" * line.endswith("…")
