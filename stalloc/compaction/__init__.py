"""Moving what lives: move plans, and their execution through the kernels."""
