"""The phases of an exchange: one enumeration for the text, the model, the GPU and every trace.

Plain integers, so that the text may close over them. A phase opens a span that lasts until the agent's next phase
or its end. `GAP` and `EXPERTS` are not opened by any text: they name the time between kernels on a critical path.
"""

GAP = 0
EXPERTS = 1

DISPATCH_START = 2
DISPATCH_ENTRY = 3
DISPATCH_COUNT = 4
DISPATCH_COUNT_REDUCE = 5
DISPATCH_COUNT_WAIT = 6
DISPATCH_PREFIX = 7
DISPATCH_PAYLOAD = 8
DISPATCH_EXIT = 9
DISPATCH_ARRIVAL = 10
DISPATCH_END = 11

COPY_START = 12
COPY_ROWS = 13

COMBINE_START = 14
COMBINE_ENTRY = 15
COMBINE_ROWS = 16
COMBINE_EXIT = 17
COMBINE_ARRIVAL = 18
COMBINE_END = 19

REDUCE_START = 20
REDUCE_ROWS = 21

NAMES = (
    "gap",
    "experts",
    "dispatch start",
    "dispatch entry barrier",
    "dispatch count",
    "dispatch count reduce",
    "dispatch count wait",
    "dispatch prefix sums",
    "dispatch payload",
    "dispatch exit",
    "dispatch arrival",
    "dispatch end",
    "copy start",
    "copy rows",
    "combine start",
    "combine entry barrier",
    "combine rows",
    "combine exit",
    "combine arrival",
    "combine end",
    "reduce start",
    "reduce rows",
)
