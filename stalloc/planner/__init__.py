"""Where it goes: offsets for the requests of a trace or a schedule, the Plan record, and the naive validator.

How a plan is found, from the outside to the inside; every step has a file of its name:

- planning: `plan` takes a trace, bare lifespans or a schedule, notes where the plan comes from, and makes the budget
  that everything below is given. Streams of a schedule get regions of their own, or share with handovers. `plan_arrays`
  rounds sizes up and puts requests of no bytes and of no time aside. What has constraints of its own (constraints)
  goes to constrained, a cycle that repeats to cycle, everything else to intervals.
- cycle: prologue and cycle lie on one axis; what wraps round is live at its end and at its beginning, and is placed
  first. What is left are intervals.
- intervals: the maximum load is the lower bound. problem says how it falls apart: what lives throughout is a stack,
  what never meets is placed by itself, and parts that look alike are placed once. The best packings of the parts make a
  best packing of the whole.
- Each part of up to 2,000 requests first gets one quick try, and if that misses the bound, exact search (search, over
  exact_search): heights are yes-or-no questions from the bound upwards, so that a bound that rises is proven.
- Larger parts, and those where the search gives up, go to the portfolio: many packings in orders that are known to be
  good (packings), by compiled passes over the requests (placement), in two layers, or into the tightest hole at birth
  (hole_filling). The first that reaches the bound ends it; otherwise the target is ratcheted down.
- Where there is time (`plan`, and not what a running program asks for), and the quickest of these miss the bound, the
  lifespan graph is the next start: colouring colours groups of requests by phases and size, fuses requests to rows and
  blocks (groups), and places them in the order of the colours.
- validator: judges the plan by comparing intervals, and shares no code with what places anything; what is asked to be
  at fixed places is judged by it first.

A peak that reaches the bound is optimal, and the plan says so. replanning changes a plan for a trace that is nearly the
same; kind_plans is for several kinds of steps in one arena; least_moves finds which live blocks to move.

Importing this package does not import numba; the first plan does.
"""

from typing import TYPE_CHECKING

from stalloc.lazy import loaded_on_use

if TYPE_CHECKING:
    from stalloc.planner.budget import METHODS, Progress
    from stalloc.planner.intervals import Layout
    from stalloc.planner.least_moves import Moves, plan_moving_least
    from stalloc.planner.plan_record import Plan, load_plans, plans_from_bytes, plans_to_bytes, save_plans
    from stalloc.planner.planning import plan, plan_arrays, plan_joint, plan_schedule
    from stalloc.planner.problem import decomposition
    from stalloc.planner.replanning import replan
    from stalloc.planner.validator import Verdict, validate, validate_kinds

__all__ = [
    "METHODS",
    "Layout",
    "Moves",
    "Plan",
    "Progress",
    "Verdict",
    "decomposition",
    "load_plans",
    "plan",
    "plan_arrays",
    "plan_joint",
    "plan_moving_least",
    "plan_schedule",
    "plans_from_bytes",
    "plans_to_bytes",
    "replan",
    "save_plans",
    "validate",
    "validate_kinds",
]

_NAMES = {
    ".budget": "METHODS Progress",
    ".intervals": "Layout",
    ".least_moves": "Moves plan_moving_least",
    ".plan_record": "Plan load_plans plans_from_bytes plans_to_bytes save_plans",
    ".planning": "plan plan_arrays plan_joint plan_schedule",
    ".problem": "decomposition",
    ".replanning": "replan",
    ".validator": "Verdict validate validate_kinds",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__getattr__ = loaded_on_use(__name__, _MODULES, {"plan_tape": "plan_schedule"})
