"""Every number that the runtime decides by: what it is of, and why it is no smaller or larger.

`decisions.py` is where they are used, each on figures that are handed in; `tests/test_decisions.py` has figures on both
sides of each. Bytes, requests, steps and passes are what a name ends with; a SHARE is one in so many, a SHIFT
1 / 2 ** so many.
"""

# --- when the record is searched for what repeats
FIRST_SCAN_REQUESTS = 24  # of a program that begins: a loop in a notebook may be over soon
SHORT_RECORD_REQUESTS = 64  # after which it is searched when it has grown by a quarter
SCAN_AGAIN_REQUESTS = 12  # from one search of a short record to the next
EAGER_STEPS = 32  # marked steps at each of which it is searched; afterwards when it has grown by a quarter
LEAST_REPEATS = 3  # of an unmarked ring: two may be chance
LEAST_PERIOD_REQUESTS = 4  # of an unmarked ring; shorter repetitions are within a step
COVERAGE = 0.6  # of the record that an unmarked ring has to fill, since layers and microbatches repeat as well
SHORT_COVERAGE = 0.75  # the same of a short record, of which a few requests are much
WHOLE_COVERAGE = 0.9  # the same once a ring that was taken for a step was a part of one
PART_RINGS = 8  # rings that were parts of a step, after which the step is looked for
KINDS_RECORD_TIMES = 3  # times that many requests, before unmarked kinds of steps are looked for
WHOLE_PERIODS = 4  # unmarked, in which lifespans are known if they ever are
LIFESPAN_SCANS = 3  # that a plan waits for lifespans which a later step may show
LITTLE_SHARE = 64  # requests, and bytes, whose lifespans are not waited for
OVERDUE_STEPS = 16  # as many requests without a mark as these have: the program has ceased to mark
OVERDUE_REQUESTS = 1 << 16  # the same for a program with an optimizer that never marked

# --- marked steps of several kinds
LEAST_STEPS = 5  # without a cycle after which kinds are looked for
DOUBT_STEPS = 4, 6, 12, 24, 48  # of which none recurs, after which it is asked what keeps them from it
THREADS_DOUBTED_STEPS = 6  # of these, before which threads are not told apart
SETTLE_STEPS = 10  # without a plan, after which none is expected soon
STEPS_BEFORE = 4  # before the first of a kind, which show what is carried over to it
MOST_KINDS = 32  # that are planned together; those seen most often
UNKNOWN_SHARE = 20  # of requests not served, from which on a step is another one
LACKING_SHARE = 100  # of requests without a place, from which on a cycle of the kinds is looked for
CYCLE_STEPS = 16  # in which the order of kinds has to repeat to be one
CYCLE_WAITS = 3  # steps that the plan of a cycle waits for lifespans
WATCH_STEPS = 64  # beside a plan for kinds that are new; the next watch comes after a pause of twice as many
UNKNOWN_STEP_COUNTS = 8  # steps of that pause, one that the plan does not know
MOST_EVENTS = 1 << 20  # of a record beside a plan
NEAR_REQUESTS = 8  # that the cursor may be off at a mark, since marks and requests may come from several threads

# --- when a plan is given up
DROP_PASSES, DROP_REQUESTS = 8, 1024  # by so many passes and requests misses outnumber hits
DROP_STEPS = 64  # the same of several kinds, whose steps differ
DROP_OF_FILE_REQUESTS = 256  # the same of a plan from a file, before another program lives in its arena
BAD_SHARE, MOST_BAD_STEPS = 4, 8  # a step is bad of which so much was not served; so many in a row end patience
PART_SHARE = 64  # of unknown requests, from which on an unmarked ring seems a part of a step
MISSED_SHARE = 8  # less is no reason to leave a ring for what may be steps of several kinds
FIRST_MARK_SHARE = 10  # of misses under an unmarked plan, with which it does not follow the marks that come now
MISLED_SHARE = 4  # the same, with which an unmarked ring was none
JUDGED_PASSES, JUDGED_REQUESTS = 8, 1024  # of an unmarked plan, after which it is judged
FITTED_PASSES = 50  # after which a plan counts as one that fitted

# --- what is held beside a plan
SPARE_BYTES = 4 << 20  # beyond the peak that are always allowed: two pages for each of two pools
PEAK_SHARE = 256  # of the peak, in which is counted what else is
PLANNED_BYTES = 8 << 20  # beyond one part, at most, where a plan serves
HELD_SHARE = 164  # of the peak, by which more may be held that a plan had to hold once
LOOSE_PARTS = 16  # where no steps repeat: what PyTorch's allocator commonly holds
MOST_PARTS = 12  # where pages never rest
MOST_PARTS_OF_STREAMS = 32  # the same where a plan keeps streams apart, as PyTorch does
SELDOM_REQUESTS = 32  # of a step for each page that moves, from which on pages rest where no plan serves
RESTLESS_STEPS, RESTLESS_PLANNED_STEPS = 8, 4  # more than those in which pages rest, before more is allowed
NO_REST_STEPS = 8  # the same, before all places of a plan may have pages
PLAN_TO_BLAME_STEPS = 16  # the same, before a cycle is looked for that needs less
IDLE_PASSES = 2  # after which a block of CuPy's pool that served nothing goes back
SETTLING_PASSES = 3  # over a plan, after the first of which whatever is free goes back
QUIET_PASSES, VAIN_PASSES = 64, 1 << 12  # without a deviation, before what the last needed goes; if it is needed again
AT_ONCE_PASSES = 2  # after which it is not
MOVING_PASSES = 4  # in a row in which pages moved, after which more will
DISPLACED_SHARE = 128  # of a pass of several kinds, which does not move the arena: steps part somewhere
UNLIKE_PASSES = 4  # of which one displaces others, as where two optimizers alternate
WASTE_RATIO = 1.1  # reserved over the peak of a step that is not known, beyond which segments go back after it
DEARER_RATIO, DEARER_BYTES = 1.5, 16 << 20  # of what was held, up to which a switch may hold where pages cannot move

# --- a program that fills the device
FULL_SHIFT = 2  # the peak leaves less of the device than this: it is full
BRIM_SHIFT = 3  # the same, for pages to stay where they are until it is
HALF_BYTES = 128 << 20  # more that is held before pages move where no plan serves, and half of the device is needed
PLANNED_SHIFT = 8  # of the peak, that is held before planned places take pages from one another
RANGE_TIMES = 2  # the device, that a range of addresses is as long as
PART_SHIFT = 2  # of the device, from which on a step that needs more than any before may fill it
MORE_SHIFT = 6  # of what steps before needed, by which one needs clearly more
SETTLED_STEPS = 8  # that need no more than those before, until a plan is put in force
COVERED = 0.9  # of the peaks of these that the plan and what lives have to hold
LEFT_REQUESTS = 8  # not served or displaced, once a plan is left
STATE_TIMES = 2  # what a model and its gradients hold, that an optimizer may ask for

# --- a step that is not the planned one, and is served by the heap to its end
ASIDE_REQUESTS, ASIDE_SHARE = 16, 32  # and of the ring, that it has to leave out, or to find taken
ASIDE_BYTES, ASIDE_SHIFT = 8 << 20, 5  # more than was expected, and of that, that it needs
LITTLE_LEFT_SHARE = 4  # of what is held, that is all that is free
TO_COME_SHARE = 8  # of what the step will need, that is still to come
ASIDE_STEPS = 64  # in a row, after which one is served as far as it is planned

# --- processor time
FIRST_PLAN_SECONDS = 1.0  # until the first plan
LATER_PLAN_SECONDS = 0.3  # at least, for what comes after it
BUDGET_STEPS = 1_000  # whose share of the program's time is there to begin with
PLANNING_SECONDS, CYCLE_SECONDS = 20e-6, 50e-6  # that a request takes to plan, and one of a cycle
MOST_PASSED_STEPS = 15  # steady steps in a row whose marks only the core notes
MOST_HEARD_STEPS = 7  # whose marks are heard, after one that did not come as expected

# --- segments of the heap
GENERAL_SEGMENT_BYTES = 20 << 20  # for requests below LARGE_BYTES, as PyTorch's
LARGE_BYTES = 10 << 20  # from here on a request gets a segment of its own
SLAB_BYTES, SLAB_WASTE = 32 << 20, 0.01  # at most, for several requests that last; what rounding may lose of it
