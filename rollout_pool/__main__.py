"""``python -m rollout_pool`` is ``rollout-pool``."""

from __future__ import annotations

import sys

from rollout_pool.cli import main

sys.exit(main())
