"""Plane waves through a random medium by split steps in CuPy, 30 of them: python cupy_fft.py [STEPS]."""

import sys

import cupy as cp

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
size, planes = 512, 24
frequency = cp.fft.fftfreq(size).astype(cp.float32)
squared = frequency[:, None] ** 2 + frequency[None, :] ** 2
propagator = cp.exp(-1j * 40.0 * squared).astype(cp.complex64)
wave = cp.ones((planes, size, size), dtype=cp.complex64)
for step in range(steps):
    phase = cp.random.random((size, size), dtype=cp.float32)
    bent = wave * cp.exp(1j * 0.2 * phase).astype(cp.complex64)
    spectrum = cp.fft.fft2(bent, axes=(1, 2))
    wave = cp.fft.ifft2(spectrum * propagator, axes=(1, 2))
    intensity = (wave.real**2 + wave.imag**2).mean(axis=(1, 2))
    image = cp.log1p(cp.abs(cp.fft.fftshift(spectrum, axes=(1, 2))))
    if step % 10 == 0:
        print(f"step {step} intensity {float(intensity.sum()):.3f} brightest {float(image.max()):.3f}")
