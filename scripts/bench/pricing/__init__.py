"""What scripts/bench/cost is made of."""
