"""A CuPy program that marks its steps, one of each size that it is given: python cupy_steps.py 1 1 2."""

import sys

import cupy as cp

import stalloc

for size in map(int, sys.argv[1:]):
    for number in range(5):
        weight = cp.ones(20_000 * size + 999 * number)
        doubled = weight * 2
        both = cp.concatenate((doubled, cp.exp(doubled) + weight[::-1]))
    del weight, doubled, both
    stalloc.step()
