"""Batches as other libraries take them. Each module loads its library when it is imported itself.

``padded``: plain tensors. ``deepspeed``: a ``RolloutEngine``. ``trl``: a ``rollout_func`` for
``GRPOTrainer``. ``verl``: a ``DataProto``.
"""
