"""Checks of a user's environment: what is found there, and what to do about it.

Each subject has a module. A check is a function that yields :class:`~rollout_pool.doctor.check.Check`
records; what it needs comes in as arguments, so that each can be tried by itself.
"""
