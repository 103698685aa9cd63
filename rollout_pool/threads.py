"""How the threads of one process wait for each other on a CPU. To be set before torch is imported."""

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""A moment of spinning, then sleep.

A step is hundreds of short operations, and threads wait after each. To wake one that sleeps takes as long as
the operation; one that spins for long takes a core from others (``docs/performance.md``). The second variable
is libgomp's, whose threads are torch's; 1,000 rounds are microseconds.
"""
