"""The commands of ``rollout-pool``: each module has ``add_arguments(parser)`` and ``run(args)``.

Their top levels import nothing heavy, so that ``--help`` and a wrong argument answer at once.
"""
