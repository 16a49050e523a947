"""How much a host computes and its disk moves in a second, as published; nothing here was measured on this machine.

A server's, since the host that a program will run on is not known: on a small one the processor is slower in proportion
to the bandwidth of its memory.
"""

ADAM_PARAMETERS_PER_SECOND = 3.3e9
"""For 32-bit Adam on the processor: 8 billion in 2.41 s on two Xeons (Ren et al., ZeRO-Offload, 2021, table 4)."""
DISK_READ_BYTES_PER_SECOND, DISK_WRITE_BYTES_PER_SECOND = 6.5e9, 3.5e9
"""Rates of one NVMe drive at PCIe 4 (Samsung, announcement of the PM9A3, U.2, 2020)."""
LAUNCH_SECONDS = 1e-5
"""Host time for a program to launch one operation of PyTorch; reports for servers lie between 5 and 25 µs."""
SOURCE = "processor: ZeRO-Offload, table 4; disk: one NVMe drive, Samsung's figures of the PM9A3"
