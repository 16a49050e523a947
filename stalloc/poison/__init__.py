"""STALLOC_POISON: patterns in free memory and behind blocks, which tell who wrote where nothing of its own is."""
