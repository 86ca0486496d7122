"""`pytest benchmarks`: times as ratios, of contestants that take turns and agree on the result.

`test_*.py` are the races, `models.py` and `ops.py` who takes part in them, `providers.py` what
else a user would pick, `race.py` and `timing.py` how they are run, `guard.py` the check against
regressions, `results/` the JSON behind RESULTS.md. Beside them, `python -m benchmarks.roofline`
predicts times on GPUs (with `costs.py`), `.tf32` counts what less precise products would change,
`.kernel_report` compiles every GPU kernel."""
