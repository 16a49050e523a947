"""What size of a program fits: many runs of it on virtual GPUs, side by side, and the search among them.

Contract: a run is the program as it is, in a fork of a process that has imported the libraries and not used the device.
What is said of a value of a parameter was seen in a run with that value, or replayed from one, unless it says so.
Importing this package imports no torch.
"""
