"""What scripts/bench/ablate does: rules of the runtime switched off, one at a time, and programs that then run."""
