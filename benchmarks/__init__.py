"""Benchmarks of shardc, and the synthetic checkpoints they run on."""
