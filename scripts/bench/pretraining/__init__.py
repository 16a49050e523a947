"""What `scripts/bench/paper` measures: models trained in a pipeline, in the configurations of the STAlloc paper."""
