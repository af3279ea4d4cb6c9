"""A fleet on paper: time to ready of 1 to 10,000 hosts, full checkpoint against per-rank pulls.

Plain arithmetic: nothing is measured, no network is touched. docs/scale.md has the formulas, the
tables and what they say. From the repository: python -m benchmarks.fleet
"""
