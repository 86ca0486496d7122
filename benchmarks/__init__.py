"""Benchmarks: `python -m benchmarks.epoch`, `.head`, `.memory`. Every result is a ratio, measured
interleaved in one run, and is printed only if the contestants agree on the answer.

`.roofline` predicts times on GPUs, and `.tf32` counts what less precise products would change."""
