"""Programs that others recorded on real GPUs, run again on the virtual one."""
