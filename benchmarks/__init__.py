"""Benchmarks (`pytest benchmarks`) and what only they need; not part of the installed package.

- `test_*.py`: the comparisons. `models.py`, `head_ops.py`, `baselines.py`, `inputs.py`: the
  implementations and their inputs. `comparison.py`, `interleaved_timing.py`: how they are timed.
- `op_cases.py`: random inputs of the ops and comparisons of results, also for tests/.
- `runs.py`, `report.py`, `plots.py`: tables, figures and the page RESULTS.md from the JSON in
  `results/`.
- `guard.py`: the check against performance regressions. `compare_checkouts.py`, `step_probe.py`:
  comparison of two checkouts.
- `compile_ahead.py`, `kernel_report*.py`: GPU kernels compiled without a GPU.
- `roofline.py`, `tf32.py`, `scaling.py`: the numbers of docs/appendix/ and docs/scaling.md.
"""
