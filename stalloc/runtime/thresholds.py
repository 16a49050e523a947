"""Every number that the runtime decides by: what it is of, and why it is no smaller or larger.

`decisions.py` is where they are used, each on figures that are handed in; `tests/test_decisions.py` has figures on both
sides of each. Bytes, requests, steps and iterations are what a name ends with; a ONE_IN and a SHARE divide: one in so
many.
"""

# --- what counts as few and as many, wherever it is asked
NEGLIGIBLE_ONE_IN = 64  # of requests or bytes: less makes no difference to a plan, and none to what a step needs
MINOR_ONE_IN = 8  # of requests: fewer that are not as planned do not make a step another one, or a cycle none
MAJOR_ONE_IN = 4  # of requests, of the device: what does not serve these is bad, what leaves less fills it
SOME_REQUESTS = 8  # not as planned, in a step: fewer may be chance
MANY_STEPS = 8  # or iterations in a row: what went on for so long goes on; fewer may be chance
MOST_QUIET_STEPS = 512  # what an evaluation needs goes where epochs are longer, and stays where they are shorter
LONG_STEPS = 64  # or iterations: what brought nothing for so long is tried ever more rarely
MANY_REQUESTS = 1024  # before misses say anything of a plan: of a short cycle many iterations are soon over
MOST_WAITS = 3  # scans or steps, that a plan waits for lifespans which a later step may show

# --- when the record is searched for what repeats
FIRST_SCAN_REQUESTS = 24  # of a record without marks: a loop in a notebook may be over soon
SCAN_AGAIN_REQUESTS = 12  # from one search of a short record to the next
SHORT_RECORD_REQUESTS = 64  # after which it is searched when it has grown by as many and by a quarter
LEAST_REPEATS = 3  # of an unmarked cycle, of kinds without marks, of what keeps steps from recurring: two may be chance
LEAST_PERIOD_REQUESTS = 4  # of an unmarked cycle; shorter repetitions are within a step
COVERAGE = 0.6  # of the record that an unmarked cycle has to fill, since layers and microbatches repeat as well
WHOLE_COVERAGE = 0.9  # the same once a cycle that was taken for a step was a part of one
OVERDUE_REQUESTS = 1 << 16  # without a mark, of a program with an optimizer that never marked a step

# --- marked steps of several kinds
LEAST_STEPS = 4  # without a cycle, or before a kind, that are looked at: of fewer nothing is carried over to a step
MOST_KINDS = 32  # that are planned together; those seen most often
ALIGNED_STEPS = 16  # of a record, the last ones: in fewer not all that is left out at times is, older ones may be over
CYCLE_STEPS = 16  # in which the order of kinds has to repeat to be one
MOST_EVENTS = 1 << 20  # of a record beside a plan

# --- what is held beyond the peak
SPARE_BYTES = 4 << 20  # that are always allowed: two pages for each of two pools
PEAK_SHARE = 256  # of the peak, in which is counted what else is
LOOSE_PARTS = 16  # where no steps repeat, or pages never rest: what PyTorch's allocator commonly holds
DYNAMIC_PARTS = 1  # under a plan of steps alike in part: with more about as many pages move for what data decides
SETTLING_ITERATIONS = 3  # over a plan, after the first of which whatever is free goes back
WASTE_RATIO = 1.1  # reserved over the peak of a step that is not known, beyond which segments go back after it
DEARER_RATIO = 1.5  # of what was held, up to which a switch may hold where pages cannot move
MANY_RANGES = 32  # of addresses: each is looked at when pages move; one or two for each stream are common
ADDRESS_TIMES = 2  # the device, that a range of addresses is as long as
STATE_TIMES = 2  # what a model and its gradients hold, that an optimizer may ask for

# --- processor time
FIRST_PLAN_SECONDS = 1.0  # until the first plan
LATER_PLAN_SECONDS = 0.3  # at least, for what comes after it
BUDGET_STEPS = 1_000  # whose share of the program's time is there to begin with
PLANNING_SECONDS = 20e-6  # that a request takes to plan
MOST_CAPTURE_REQUESTS = 1 << 14  # of a warm-up that is planned before its capture: 3.8 s where its requests are random
MOST_PASSED_STEPS = 15  # steady steps in a row whose marks only the core notes, or are heard after one that was not

# --- segments of the heap
GENERAL_SEGMENT_BYTES = 20 << 20  # for requests below LARGE_BYTES, as PyTorch's
LARGE_BYTES = 10 << 20  # from here on a request gets a segment of its own
SLAB_BYTES, SLAB_WASTE = 32 << 20, 0.01  # at most, for several requests that last; what rounding may lose of it
