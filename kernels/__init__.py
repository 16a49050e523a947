"""Triton kernels that move and fill many blocks in one launch; imported as `stalloc.kernels`."""
