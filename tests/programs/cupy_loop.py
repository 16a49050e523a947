"""A small CuPy program that repeats a step: python cupy_loop.py [STEPS] [--fail | --mark | --other | --exit CODE]."""

import sys

import cupy as cp

arguments = sys.argv[1:]
steps = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 60
factor = 3 if "--other" in arguments else 1
print("the program prints")
weights = [cp.ones(20_000 * factor + 999 * i) for i in range(5)]
total = 0
for step in range(steps):
    for weight in weights:
        doubled = weight * 2
        both = cp.concatenate((doubled, cp.exp(doubled) + weight[::-1]))
        total = total + both.reshape(2, -1).sum(axis=0).mean()
    if "--mark" in arguments:
        import stalloc

        stalloc.step()
    if step == 30 and "--fail" in arguments:
        raise ValueError("the program fails")
if "--exit" in arguments:
    sys.exit(int(arguments[-1]))
