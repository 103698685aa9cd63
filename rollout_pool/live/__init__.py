"""What a pool is doing, while it does it: metrics, a view for terminals, progress.

:mod:`~rollout_pool.live.metrics` names what Ray's metrics endpoint gets, :mod:`~rollout_pool.live.monitor`
is the part of the pool actor that looks, :mod:`~rollout_pool.live.progress` is for the driver.
"""
