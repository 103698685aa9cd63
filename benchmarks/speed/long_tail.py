"""The same model with ends of samples that nobody can foresee: one in ten is eight times longer.

Budgets would tell schedulers beforehand what they cannot know of real samples. So the model itself ends
them: a folder that brings a few lines of code of its own (`drawn_ends.py`), which every peer loads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

CODE = Path(__file__).with_name("drawn_ends.py")


def folder_with_drawn_ends(model: str, folder: Path, short: int, long: int, eos: int) -> Path:
    """A Llama's folder with ends in the columns ``short`` and ``long``: the tokens of a row, prompt and EOS
    included, in nine rows of ten and in the tenth."""
    source = Path(model)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {
        "architectures": ["DrawnEndsForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "drawn_ends.DrawnEndsForCausalLM"},
        "drawn_ends": {"short": short, "long": long, "eos": eos},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    shutil.copy(CODE, folder / CODE.name)
    return folder
