"""What gets worse without a rule, on how many programs, and whether it stays.

Contract: figures without a rule are held against those of the same programs with all rules, measured in the same way.
"""

from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
WORSE = 1.02  #: times what a program held
SLOWER = 0.10  #: more of the processor time that a step takes by itself
NOISE = 0.30  #: of stalloc's part of it, by which two runs differ on a busy machine
LEAST_RANDOM = 0.985  #: of the random programs have to complete in torch's least memory
MOST_HOLDING, MOST_SLOWER = 2, 2  #: programs that may hold more, and be slower

Figures = dict[str, dict[str, Any]]  #: by trial


@dataclass
class Judgement:
    higher: list[str] = field(default_factory=list)  #: programs whose peak rises by 2 %
    lower: list[str] = field(default_factory=list)  #: falls by as much
    fails: list[str] = field(default_factory=list)  #: that no longer complete in the allowed memory
    hits: list[str] = field(default_factory=list)  #: whose hit rate falls by a hundredth
    steady: list[str] = field(default_factory=list)  #: with more steady steps that call the driver
    slower: list[str] = field(default_factory=list)
    random_rate: tuple[float, float] = (0.0, 0.0)  #: share that completes: with the rule and without
    excess: tuple[float, float] = (0.0, 0.0)  #: share of changing programs that hold too much, the same
    random_higher: int = 0  #: changing programs whose peak rises by 2 %
    random_lower: int = 0  #: falls by as much
    compared: int = 0  #: trials
    tried: int = 0  #: of these, without the rule: in the others it decided nothing
    errors: list[str] = field(default_factory=list)
    is_whole: bool = True  #: no trial is missing

    @property
    def reasons(self) -> str:
        """Letters of ../shared's rule: (a) completes, (b) holds, (c) processor time, (d) steady steps."""
        found = "a" if self.fails or self.random_rate[1] < min(LEAST_RANDOM, self.random_rate[0]) else ""
        found += "b" if len(self.higher) > MOST_HOLDING else ""
        found += "c" if len(self.slower) > MOST_SLOWER else ""
        return found + ("d" if self.steady else "")

    @property
    def is_clear(self) -> bool:
        return len(self.higher) > MOST_HOLDING + 1 or bool(self.fails)

    @property
    def verdict(self) -> str:
        """Whether the rule stays; of one that goes, how many of the random programs hold more, if many do."""
        if self.errors:
            return "errs"
        if not self.tried:
            return "decides nothing"
        if self.reasons:
            return f"stays ({self.reasons})"
        goes = "goes" if self.is_whole else "goes so far"
        return f"{goes}, but {self.random_higher} random" if self.random_higher > self.random_lower + 2 else goes


def judge(
    base: Figures, without: Figures, native_ms: dict[str, float], better_bytes: dict[str, int], same: set[str]
) -> Judgement:
    """Hold figures without a rule against those with it; the dictionaries are by program.

    `same` are trials in which the rule decides nothing.
    """
    row = Judgement()
    rates: dict[str, list[tuple[bool, bool]]] = {"tight": [], "changing": []}
    for key, before in base.items():
        now = without.get(key, before if key in same else None)
        if now is None:
            row.is_whole = False
            continue
        row.compared += 1
        row.tried += key in without
        kind, name, *size = key.split(" ")
        if "error" in now or "error" in before:
            row.errors.append(f"{name}: {now.get('error', before.get('error'))}")
        elif kind == "tight":
            rates[kind].append((before["completes"], now["completes"]))
        elif kind == "changing":
            most = better_bytes[f"changing-{name}"]
            most += max(4 * MIB, most // 200)
            rates[kind].append((before["peak_bytes"] > most, now["peak_bytes"] > most))
            row.random_higher += now["peak_bytes"] >= WORSE * before["peak_bytes"]
            row.random_lower += before["peak_bytes"] >= WORSE * now["peak_bytes"]
        elif size[0] != "ample":
            if before["completes"] and not now["completes"]:
                row.fails.append(name)
        else:
            _judge_ample(row, name, before, now, native_ms.get(name, 0.0))
    row.random_rate, row.excess = (_shares(rates[kind]) for kind in ("tight", "changing"))
    return row


def _shares(pairs: list[tuple[bool, bool]]) -> tuple[float, float]:
    count = max(1, len(pairs))
    return sum(one for one, _ in pairs) / count, sum(one for _, one in pairs) / count


def _judge_ample(row: Judgement, name: str, before: dict[str, Any], now: dict[str, Any], native: float) -> None:
    was, held = before["peak_bytes"], now["peak_bytes"]
    if not now["completes"]:
        row.fails.append(f"{name} with 80 GiB")
    if held >= WORSE * was:
        row.higher.append(f"{name} {100 * (held / was - 1):+.1f} %")
    if was >= WORSE * held:
        row.lower.append(f"{name} {100 * (held / was - 1):+.1f} %")
    rates = before["known_hit_rate"], now["known_hit_rate"]
    if rates[0] is not None and (rates[1] or 0.0) < rates[0] - 0.01:
        row.hits.append(f"{name} {100 * rates[0]:.1f} to {100 * (rates[1] or 0.0):.1f}")
    if now["steady_calls"] > 2 * before["steady_calls"] + 1:
        row.steady.append(f"{name} {before['steady_calls']} to {now['steady_calls']} of {now['steps']}")
    more = now.get("step_ms", 0.0) - before.get("step_ms", 0.0)
    if native and more > max(SLOWER * native, NOISE * before.get("step_ms", 0.0)):
        row.slower.append(f"{name} {more:+.2f} of {native:.1f} ms a step")
