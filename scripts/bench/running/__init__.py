"""What scripts/bench/runtime runs: made-up programs, step by step, through the runtime on a device of numbers."""
