"""Where rules say that they decided something: programs in which one never did run without it as they do with it.

Contract: a probe changes nothing but that it calls `fired`, which trials.py puts into builtins, where the rule's answer
is not the neutral one. All probes are in one copy at a time.
"""

from changed import Change


def _probe(name: str, file: str, old: str, new: str) -> Change:
    return Change(
        name=name,
        file=f"{file if '/' in file else f'stalloc/runtime/{file}'}.py",
        old=old,
        new=new.replace("FIRED", f'fired("{name}")'),
    )


def _before(name: str, file: str, statement: str) -> Change:
    """A rule decides where a statement, or more of them, is about to run."""
    indent = statement[: len(statement) - len(statement.lstrip())]
    return _probe(name, file, statement, f"{indent}FIRED\n{statement}")


PROBES = (
    _probe(
        "stitched segments",
        "paging",
        "self._stitched.make(pool, size_bytes)",
        "self._stitched.make(pool, size_bytes) and FIRED",
    ),
    _before("bypass", "bypass", "        self._in_a_row += 1\n"),
    _before("cycles of kinds", "kind_search", "                    self._look_for_cycle(trace, self.record)"),
    _probe(
        "cycles of kinds",
        "steps",
        "again = self.cycles.is_due(pages_move=pages_move) and self.search is None",
        "again = self.cycles.is_due(pages_move=pages_move) and self.search is None and FIRED",
    ),
    _before("noise", "noise_requests", "        self._recording.leaves_out_noise = True"),
    _probe(
        "full device",
        "full_device",
        "return fits and decisions.covers(held_bytes, self._peaks, self._num_settled)",
        "return (fits and decisions.covers(held_bytes, self._peaks, self._num_settled)) or not FIRED",
    ),
    _probe(
        "full device",
        "full_device",
        "return decisions.most_misses_where(elsewhere, may_fill=self.may_fill())",
        "return decisions.most_misses_where(elsewhere, may_fill=self.may_fill() and FIRED)",
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
        "if self._memory.source.paged and self._memory.paging.fills_part():",
        "if self._memory.source.paged and self._memory.paging.fills_part() and FIRED:",
    ),
    _probe(
        "growing allowance",
        "allowance",
        "if decisions.is_restless(self._restless) and not rests:",
        "if decisions.is_restless(self._restless) and not rests and FIRED:",
    ),
    _before("moves of the arena", "tidying", "        self._move_wait = decisions.next_move_wait("),
    _probe(
        "shared begins",
        "stalloc/planner/region_plan",
        "alike = places_of_begin(kind, own, self._done[buffer], kept)",
        "alike = places_of_begin(kind, own, self._done[buffer], kept)\n        (alike >= 0).any() and FIRED",
    ),
    _before("turns", "stalloc/planner/carried_over", "    return [replace(one, has_two=rank"),
    _before("validation", "plan_validation", "            self.is_on = True\n"),
    _before("watch pauses", "step_watch", "            self.pause()\n            self._next"),
    _probe(
        "pages that linger", "tidying", "elif self._quiet_iterations > 0:", "elif self._quiet_iterations > 0 and FIRED:"
    ),
    _probe(
        "order of kinds",
        "step_places",
        "        return self._buffer * len(self._switches_buffers) + self._expected()",
        "        self._expected() != self._run[1] and FIRED\n"
        "        return self._buffer * len(self._switches_buffers) + self._expected()",
    ),
    _before(
        "patience", "controller", "        self.state.triggers.after_misses(2 * record.follow.misses_over_matches)"
    ),
    _probe(
        "brim",
        "paging",
        "if excess > 0 and self._holds(decisions.is_at_brim):",
        "if excess > 0 and self._holds(decisions.is_at_brim) and FIRED:",
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
        "steps of the cycle",
        "steps",
        "return self.schedules is None and self._recording.kept is not None and",
        "return self.schedules is None and self._recording.kept is not None and FIRED and",
    ),
    _before("kinds without marks", "steps", "            self.search = KindSearch(None, wanted"),
    _probe(
        "waiting for lifespans",
        "record_search",
        "and self._is_worth_waiting(schedule):",
        "and self._is_worth_waiting(schedule) and FIRED:",
    ),
    _before("loosening", "tidying", "            arenas.memory.paging.allowance.loosen()"),
    _probe(
        "seen before marks",
        "recorded_steps",
        "int(self._was_seen_before(size, stream))",
        "int(self._was_seen_before(size, stream) and FIRED)",
    ),
    _before("steady marks", "steady_marks", "        self._names.append(name)\n"),
)
PROBED = {probe.name for probe in PROBES}
