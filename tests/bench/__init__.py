"""Benches: one module each, started by tests/bench.py."""
