"""What runs inside one Ray actor: the rollout actor and the engine under it."""
