"""The soak of streams, events and captures under a stalloc that takes one of the driver's functions for done."""

import ctypes
import json
import sys
from dataclasses import asdict, replace

BENCH, FAULT = sys.argv[1:]
sys.path.insert(0, BENCH)

from running.soak_order import OrderSoak  # noqa: E402

from stalloc.device.ordering import ordering  # noqa: E402

soak = OrderSoak(6)
nothing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)(lambda *_: 0)
real = ordering()
assert real is not None
soak.state.order_streams(replace(real, **{FAULT: ctypes.cast(nothing, ctypes.c_void_p).value}))
print(json.dumps(asdict(soak.run(20_000))))
