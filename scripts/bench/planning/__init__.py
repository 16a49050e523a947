"""What `scripts/bench/planner` measures with: instances, made and read, and the methods that others published."""
