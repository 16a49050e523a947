"""Where rules say that they decided something: programs in which one never did run without it as they do with it.

Contract: a probe changes nothing but that it calls `fired`, which trials.py puts into builtins, where the rule's answer
is not the neutral one. All probes are in one copy at a time.
"""

from changed import Change

from ablation.rules import RUNTIME


def _probe(name: str, file: str, old: str, new: str) -> Change:
    return Change(name=name, file=f"{RUNTIME}{file}.py", old=old, new=new.replace("FIRED", f'fired("{name}")'))


def _before(name: str, file: str, statement: str) -> Change:
    """A rule decides where a statement, or more of them, is about to run."""
    indent = statement[: len(statement) - len(statement.lstrip())]
    return _probe(name, file, statement, f"{indent}FIRED\n{statement}")


PROBES = (
    _probe(
        "splices", "paging", "self._splices.make(pool, size_bytes)", "self._splices.make(pool, size_bytes) and FIRED"
    ),
    _before("standing aside", "standing_aside", "        self._in_a_row += 1\n"),
    _before("cycles of kinds", "kind_search", "                    self._look_for_cycle(trace, self.record)"),
    _probe(
        "cycles of kinds",
        "steps",
        "again = self.cycles.is_due(pages_move=pages_move) and self.search is None",
        "again = self.cycles.is_due(pages_move=pages_move) and self.search is None and FIRED",
    ),
    _before("stray requests", "stray_requests", "        self._recording.left_out.add(STRAY)"),
    _probe(
        "full device",
        "full_device",
        "return held_bytes + _SPARE_BYTES <= self._memory.paging.device_bytes and self._covers(arena_bytes)",
        "return (held_bytes + _SPARE_BYTES <= self._memory.paging.device_bytes and self._covers(arena_bytes)) "
        "or not FIRED",
    ),
    _probe(
        "full device",
        "full_device",
        "return min(elsewhere, _LOST) if self.may_fill() else elsewhere",
        "return min(elsewhere, _LOST) if self.may_fill() and FIRED else elsewhere",
    ),
    _probe(
        "full device",
        "full_device",
        "return self._is_full() or self._goes_beyond(size_bytes)",
        "return (self._is_full() or self._goes_beyond(size_bytes)) and FIRED",
    ),
    _probe(
        "full device",
        "full_device",
        "if self._memory.source.paged and self._memory.paging.fills_part(_PART_SHIFT):",
        "if self._memory.source.paged and self._memory.paging.fills_part(_PART_SHIFT) and FIRED:",
    ),
    _probe("growing allowance", "allowance", "_PATIENCE) and not rests:", "_PATIENCE) and not rests and FIRED:"),
    _probe(
        "held once",
        "allowance",
        "if self._is_planned and self.is_marked:",
        "if self._is_planned and self.is_marked and FIRED:",
    ),
    _before("moves of the arena", "tidying", "        soon = record.steps_ever < self._move_after"),
    _probe(
        "shared begins",
        "region_plan",
        "alike = places_of_begin(kind, own, self._done[turn], kept)",
        "alike = places_of_begin(kind, own, self._done[turn], kept)\n        (alike >= 0).any() and FIRED",
    ),
    _before("turns", "handed_on", "    return [replace(one, has_two=rank"),
    _probe(
        "novelty",
        "novelty",
        "return self._excess >= self._too_many",
        "return self._excess >= self._too_many and FIRED",
    ),
    _probe("novelty", "novelty", "ends = self._excess == _MOST", "ends = self._excess == _MOST and FIRED"),
    _before("probation", "probation", "            self.is_on = True\n"),
    _before("watch pauses", "step_watch", "            self.pause()\n            self._next"),
    _before("small live on", "lasting", "                self._state.record.small_apart = APART_FOR_LONG"),
    _before("stacked places", "region_plan", "    return min(region, stacked,"),
    _before("longer lived", "serving", "            self._state.arena.begin_step(*longer)"),
    _before("moves in a pass", "tidying", "        is_astray = record.excess_misses > 2"),
    _probe("pages that linger", "tidying", "elif self._quiet_passes > 0:", "elif self._quiet_passes > 0 and FIRED:"),
    _probe(
        "order of kinds",
        "kind_order",
        "        return self._turn * len(self._ends_turn) + self._expected()",
        "        self._expected() != self._run[1] and FIRED\n"
        "        return self._turn * len(self._ends_turn) + self._expected()",
    ),
    _probe(
        "out of order",
        "step_misses",
        "return self._astray >= _MOST_ASTRAY * _IN_ORDER",
        "return self._astray >= _MOST_ASTRAY * _IN_ORDER and FIRED",
    ),
    _before("patience", "watching", "        record.ask_after_misses = 2 * record.excess_misses"),
    _before("longer rings", "planning_job", "            other = make(longer,"),
    _probe(
        "brim and half",
        "paging",
        "if excess > 0 and self._leaves_less_than(_BRIM_SHIFT):",
        "if excess > 0 and self._leaves_less_than(_BRIM_SHIFT) and FIRED:",
    ),
    _probe(
        "brim and half",
        "paging",
        "if excess > 0 and self._arena is None and self.fills_half():",
        "if excess > 0 and self._arena is None and self.fills_half() and FIRED:",
    ),
    _probe(
        "spared pages",
        "paging",
        "self.allowance.peak_bytes >> _PLANNED_SHIFT if place[1] else 0",
        "self.allowance.peak_bytes >> _PLANNED_SHIFT if place[1] and FIRED else 0",
    ),
    _before("saving", "memory", "            self.state.write(memory_is_short=1)"),
    _before("saving", "paging", "        self._state.write(memory_is_short=1)"),
    _probe(
        "plan for memory",
        "controller",
        "if not served and planned and self.shortage.is_enough_in_pieces(size_bytes):",
        "if not served and planned and self.shortage.is_enough_in_pieces(size_bytes) and FIRED:",
    ),
    _probe(
        "kinds put off",
        "kind_search",
        "        self.put_off = late - self.in_time",
        "        self.put_off = late - self.in_time\n        self.put_off and FIRED",
    ),
    _probe(
        "steps of the ring",
        "steps",
        "return self.tapes is None and self._recording.kept is not None and",
        "return self.tapes is None and self._recording.kept is not None and FIRED and",
    ),
    _before("kinds without marks", "steps", "            self.search = KindSearch(None, wanted"),
    _probe(
        "waiting for lifespans",
        "looking",
        "and self._is_worth_waiting(tape):",
        "and self._is_worth_waiting(tape) and FIRED:",
    ),
    _before("loosening", "tidying", "            arenas.memory.paging.allowance.loosen()"),
    _probe(
        "seen before marks",
        "recorded_steps",
        "int(self._was_seen_before(size, stream))",
        "int(self._was_seen_before(size, stream) and FIRED)",
    ),
    _probe("scattered stays", "tidying", "or self._leaves_too_much\n", "or (self._leaves_too_much and FIRED)\n"),
    _probe(
        "places of marks", "step_places", "if min(behind, ahead) > _NEAR:", "if min(behind, ahead) > _NEAR and FIRED:"
    ),
    _before("steady marks", "steady_marks", "        self._names.append(name)\n"),
    _before("strands", "strands", "        self._search_at = len("),
    _before("irregular threads", "recording", "            self.left_out |= found\n"),
)
PROBED = {probe.name for probe in PROBES}
