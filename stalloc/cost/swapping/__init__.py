"""Published ways to keep a model in host memory, replayed on a recorded step: one model a file."""
