"""What a recording of a program's requests consists of."""

import enum

MALLOC, FREE, REFUSED = 0, 1, 2  # refused: there was no memory for it


class Row(enum.IntEnum):
    MARK = 10  #: of a step
    STEP_END = 11  #: as the benchmark counts steps
    EXPECT_LASTING = 12
    END_LASTING = 13
    EXPECT_MARKS = 14
    RELEASE = 15  #: torch.cuda.empty_cache()
