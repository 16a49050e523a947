"""Whether most of a program's steps are of kinds that it hardly took before.

Contract: plans of kinds of steps are of no use to such a program: what they serve in part of a step that they do not
know lies scattered, and the heap packs it better. So none are made while such steps outnumber others by far, and those
in force are given up where they come to; from then on there are none before others have made up for all of them.
"""

_TOO_MANY, _MOST = 16, 32  # by which they outnumber others, so that no plan is made, and until one is given up
_SEEN = 2  # times, at most, that a kind was seen which is new


class Novelty:
    """Of the steps of one device."""

    def __init__(self) -> None:
        self._excess = 0  # of new steps, as far as they are not made up for
        self._too_many = _TOO_MANY

    def note(self, times_seen: int) -> None:
        """A step was recorded, of a kind that was seen so often by now."""
        self._excess = min(_MOST, max(0, self._excess + (1 if times_seen <= _SEEN else -1)))

    def forget(self) -> None:
        """What steps are is told in another way from here on."""
        self._excess, self._too_many = 0, _TOO_MANY

    @property
    def is_too_much(self) -> bool:
        """Whether plans of kinds of steps are not worth making now."""
        return self._excess >= self._too_many

    def ends_plan(self) -> bool:
        """Whether a plan in force is to be given up; then none is made for long."""
        ends = self._excess == _MOST
        if ends:
            self._too_many = 1
        return ends
