"""The real pool over engines that only pretend to work, in a time that jumps.

``PoolActor``, its queue, its recovery and its weight syncs run as they are; what they call is a model of an
engine with a stated latency. So a thousand actors, or hundreds of failures, take seconds on one core, and
every run with the same seed is the same run. See docs/scale.md.
"""
