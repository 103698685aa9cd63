"""One self-contained page about a run: its timeline, its distributions, its samples.

Needs Jinja2 (``pip install 'rollout-pool[report]'``). The page holds its data and its scripts, Apache
ECharts among them, and asks no network for anything.
"""
