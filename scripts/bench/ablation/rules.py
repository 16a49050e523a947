"""The rules of the runtime that can be switched off: for each where it decides, and its neutral answer."""

from dataclasses import dataclass

from changed import Change

RUNTIME, CORE = "stalloc/runtime/", "stalloc/core/"


@dataclass(frozen=True)
class Rule:
    """One rule, or several that are tried together."""

    name: str
    lines: int  #: of the package that go with it, about
    what: str
    changes: tuple[Change, ...]
    arena: str = "pages"  #: what it is for

    def __add__(self, other: "Rule") -> "Rule":
        """Both off."""
        name, what = f"{self.name} + {other.name}", "several rules"
        return Rule(name, self.lines + other.lines, what, self.changes + other.changes, self.arena)


def _rule(name: str, lines: int, what: str, *places: tuple[str, str, str], arena: str = "pages") -> Rule:
    changes = tuple(Change(name=name, file=file, old=old, new=new) for file, old, new in places)
    return Rule(name, lines, what, changes, arena)


def _returns(file: str, begin: str, answer: str) -> tuple[str, str, str]:
    """A function's first statement, before which it returns an answer."""
    indent = begin[: len(begin) - len(begin.lstrip())]
    return file, begin, f"{indent}if True:\n{indent}    return {answer}\n{begin}"


RULES = (
    _rule(
        "steady marks",
        360,
        "the core notes the marks of expected steps itself",
        (
            RUNTIME + "controller.py",
            "elif self._is_planned and self._bypass.is_far:",
            "elif False:",
        ),
    ),
    _rule(
        "stitched segments",
        257,
        "a large request is served from what two pages have left over",
        (RUNTIME + "paging.py", "return self._stitched.make(pool, size_bytes)", "return False"),
    ),
    _rule(
        "bypass",
        190,
        "a step that is not as planned is served by the heap to its end",
        _returns(
            RUNTIME + "bypass.py",
            "        record = self._state.record\n        if self._has_moved or not decisions",
            "False",
        ),
    ),
    _rule(
        "cycles of kinds",
        139,
        "a cycle of several kinds of steps is planned as one cycle",
        (
            RUNTIME + "kind_search.py",
            "if (self.lacks_places or self.pages_move) and self.record is not None:",
            "if False:",
        ),
        (
            RUNTIME + "steps.py",
            "again = self.cycles.is_due(pages_move=pages_move) and self.search is None",
            "again = False",
        ),
    ),
    _rule(
        "noise",
        114,
        "requests of any size are left out of steps",
        (RUNTIME + "recorded_steps.py", "if not self._noise.leave_out():", "if True:"),
    ),
    _rule(
        "full device",
        113,
        "plans wait for, and leave, a program that fills the device",
        (RUNTIME + "full_device.py", "if not self.may_fill() or arena_bytes", "if True or arena_bytes"),
        (
            RUNTIME + "full_device.py",
            "return decisions.most_misses_where(elsewhere, may_fill=self.may_fill())",
            "return elsewhere",
        ),
        (
            RUNTIME + "full_device.py",
            "if not decisions.is_left(max(record.follow.misses_over_matches, self._state.num_displaced)) or",
            "if True or",
        ),
        (
            RUNTIME + "full_device.py",
            "if self._memory.source.paged and self._memory.paging.fills_part():",
            "if False:",
        ),
    ),
    _rule(
        "growing allowance",
        80,
        "more is held where pages move in step after step",
        (
            RUNTIME + "allowance.py",
            "if decisions.is_restless(self._restless) and not rests:",
            "if False:",
        ),
    ),
    _rule(
        "moves of the arena",
        75,
        "the arena moves away from what displaces its requests",
        (
            RUNTIME + "tidying.py",
            "not decisions.may_move_arena(self._state.num_displaced, length, has_kinds=has_kinds)",
            "True",
        ),
    ),
    _rule(
        "shared begins",
        100,
        "kinds of steps that begin alike have one place for what they begin with",
        (
            "stalloc/planner/region_plan.py",
            "alike = places_of_begin(kind, own, self._done[buffer], kept)",
            "alike = np.full(len(own), -1, np.int64)",
        ),
    ),
    _rule(
        "turns",
        85,
        "a request that replaces one that lives yet has two places, used in turn",
        (
            "stalloc/planner/carried_over.py",
            "return _double_buffered(found) if double_buffered else found",
            "return found",
        ),
    ),
    _rule(
        "validation",
        90,
        "a cycle found without marks is judged after eight passes",
        _returns(
            RUNTIME + "plan_validation.py",
            "        record = self._state.record\n        length = record.follow.cycle_end - "
            "record.follow.cycle_start\n",
            "None",
        ),
    ),
    _rule(
        "watch pauses",
        45,
        "steps beside a plan are recorded for 64 steps, then after ever longer pauses",
        (RUNTIME + "step_watch.py", "if decisions.watch_left(self._steps) < 0:", "if False:"),
    ),
    _rule(
        "pages that linger",
        40,
        "what a deviation needed goes back after passes without one",
        (RUNTIME + "tidying.py", "elif self._quiet_iterations > 0:", "elif False:"),
    ),
    _rule(
        "order of kinds",
        45,
        "which kind of step comes next is learnt; without it the last one is expected",
        _returns(
            RUNTIME + "step_places.py", "        before, last, count = self._run\n        earlier", "self._run[1]"
        ),
    ),
    _rule(
        "patience",
        35,
        "a plan of a program that marks steps stays although much is missed",
        (RUNTIME + "controller.py", "if record.triggers.ask_after_misses or self.full_device.may_fill():", "if True:"),
    ),
    _rule(
        "pages ahead",
        45,
        "pages that the plan needs soon come with those that it needs now",
        (
            RUNTIME + "paging.py",
            "ahead = self._state.arena.lacking_ahead(position) if self.allowance.is_marked else []",
            "ahead: list[int] = []",
        ),
    ),
    _rule(
        "gathering",
        35,
        "all free pages are unmapped at once where a plan or a state comes",
        (
            RUNTIME + "paging.py",
            "        if self._memory.is_capturing:\n            return\n        self._gathers = True",
            "        if True:\n            return\n        self._gathers = True",
        ),
    ),
    _rule(
        "brim",
        8,
        "pages stay where they are while less than an eighth of the device is left",
        (RUNTIME + "paging.py", "if excess > 0 and self._holds(decisions.is_at_brim):", "if False:"),
    ),
    _rule(
        "persistent",
        90,
        "what is meant to last gets segments of its own",
        (
            RUNTIME + "persistent_phase.py",
            "self._building = watching and self._state.record.total.num_allocs == 0",
            "self._building = False",
        ),
        _returns(RUNTIME + "persistent_phase.py", "        self._building = False\n        if planned and", "None"),
    ),
    _rule(
        "saving",
        60,
        "where memory is short holes are used and segments cut to size",
        (RUNTIME + "memory.py", "self.state.write(memory_is_short=1)", "pass"),
        (RUNTIME + "paging.py", "self._state.write(memory_is_short=1)", "pass"),
    ),
    _rule(
        "plan for memory",
        15,
        "the plan is given up where a request would fail",
        (
            RUNTIME + "controller.py",
            "if not served and planned and self.shortage.is_enough_in_pieces(size_bytes):",
            "if False:",
        ),
    ),
    _rule(
        "steps of the cycle",
        25,
        "the steps of a cycle in force are planned with new kinds",
        (
            RUNTIME + "steps.py",
            "return self.schedules is None and self._recording.kept is not None and",
            "return False and",
        ),
    ),
    _rule(
        "kinds without marks",
        300,
        "kinds of steps are found where nothing marks steps",
        (
            RUNTIME + "controller.py",
            "if not self.memory.source.paged or not self._search.shows_kinds:",
            "if True:",
        ),
    ),
    _rule(
        "waiting for lifespans",
        20,
        "a plan waits for lifespans that are not known yet",
        (
            RUNTIME + "record_search.py",
            "if schedule is not None and not schedule.planned.all() and self._is_worth_waiting(schedule):",
            "if False:",
        ),
    ),
    _rule(
        "loosening",
        15,
        "more is held where no steps repeat",
        (RUNTIME + "tidying.py", "arenas.memory.paging.allowance.loosen()", "pass"),
    ),
    _rule(
        "seen before marks",
        30,
        "a step that came before there were marks counts as seen",
        (
            RUNTIME + "recorded_steps.py",
            "self._times_seen[name] = int(self._was_seen_before(size, stream))",
            "self._times_seen[name] = 0",
        ),
    ),
    _rule(
        "places of marks",
        10,
        "a mark moves the cursor of a cycle to the next start of a step",
        (RUNTIME + "step_places.py", "if not decisions.is_near_mark(min(behind, ahead)):", "if False:"),
    ),
    # --- in the core: compiled anew
    _rule(
        "leases",
        377,
        "the heap borrows idle parts of the arena",
        (
            CORE + "lending.py",
            "if state.plan.interval_streams >> (stream & 63) & 1 == 0 or live_is_full(state):",
            "if size > 0:",
        ),
    ),
    _rule(
        "learnt lifespans",
        80,
        "leases go by how long such requests lived",
        (CORE + "lending.py", "known = lifespan_at(state, row).value", "known = 0"),
        (
            CORE + "learnt_lifespans.py",
            "return lifespan_at(state, row).value > state.follow.cycle_end - state.follow.cycle_start",
            "return False",
        ),
    ),
    _rule(
        "small apart in plans",
        45,
        "small planned requests lie together",
        (
            RUNTIME + "arenas.py",
            "schedule, source = on_pages(schedule, apart=not fills), self",
            "schedule, source = on_pages(schedule, apart=False), self",
        ),
    ),
    _rule(
        "little borrows nothing",
        5,
        "requests below 64 KiB get no lease",
        (CORE + "requests.py", "together = size < LITTLE or (", "together = ("),
    ),
    _rule(
        "lending before growth",
        15,
        "everything idle is lent before reserved memory grows",
        (CORE + "requests.py", "        and exceeds_peak(state, size)\n", "        and size < 0\n"),
    ),
    _rule(
        "bad iterations",
        12,
        "a plan goes after eight bad iterations",
        (
            CORE + "iteration_log.py",
            "if state.iterations.bad_iterations >= _MAX_BAD_ITERATIONS:",
            "if state.iterations.bad_iterations < 0:",
        ),
    ),
    _rule(
        "pairs",
        35,
        "a pair of requests is looked for in the next 64 entries",
        (
            CORE + "schedule_cursor.py",
            " else _pair_ahead(state, first, end)\n",
            " else -1\n",
        ),
    ),
    _rule(
        "alignment",
        230,
        "what steps have in common that differ in part is planned",
        (RUNTIME + "controller.py", "elif may_be_aligned:", "elif False:"),
    ),
    _rule(
        "alignment again",
        14,
        "steps are aligned again where much was missed",
        (RUNTIME + "controller.py", "if not again or self.status.cpu_budget.is_spent:", "if again or not again:"),
    ),
    _rule(
        "room",
        75,
        "the plan of a cycle leaves room for dynamic requests",
        (RUNTIME + "planning_job.py", "plan = leave_room(plan, self.with_dynamic)", "del leave_room"),
    ),
    _rule(
        "remnants",
        25,
        "small requests use what large ones leave of their pages",
        (CORE + "heap.py", "if fit == 0 and pool >= 0 and (is_short or _fills_pages(state)):", "if size < 0:"),
    ),
    _rule(
        "shared pages",
        156,
        "pages that are free in several segments go too",
        (
            CORE + "leaving.py",
            "count, moved = leave_shared_pages(state, wanted, low, high, addresses, sizes, first, before, after)",
            "moved = 0",
        ),
    ),
    _rule(
        "planned to last",
        20,
        "a displaced request borrows for as long as the plan has it live",
        (
            CORE + "lending.py",
            "lasts = max(known, _planned_to_last(state, now) if displaced else 0)",
            "lasts = known",
        ),
    ),
    _rule(
        "branches",
        25,
        "a pass that goes on as another schedule does follows that",
        (
            CORE + "schedule_cursor.py",
            "position = _branch(state, key) if state.follow.num_schedules > 1 else -1",
            "position = -1",
        ),
    ),
    _rule(
        "begins anew",
        30,
        "three requests that begin a schedule move the cursor there",
        _returns(
            CORE + "schedule_cursor.py",
            "    others = state.follow.num_schedules if state.follow.num_schedules > 1 else 0\n",
            "-1",
        ),
    ),
)
BY_NAME = {rule.name: rule for rule in RULES}
