"""What scripts/bench/hostile is made of: a corpus, mutations by kind of file, and forked workers that run verbs."""
