"""Rollouts per second beside what people would otherwise use: workloads, peers, rounds, tables.

`benchmarks/bench.py` is the command, `docs/performance.md` says what is measured and how.
"""
