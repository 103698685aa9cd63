"""The process of one part: runs its steps and says, in lines of JSON, what began and what came out."""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from gpu.parts import Part, Row, Setting

MARK = "@gpu_check "
DEVICE_LOST = 3
NO_DEVICE = 4


def tell(**event: Any) -> None:
    print(MARK + json.dumps(event), flush=True)


def work(part: Part, first: int, is_dry: bool, seed: int) -> int:
    """Run the steps from number ``first`` on; returns the process's exit code."""
    import torch

    if not is_dry and not torch.cuda.is_available():
        return NO_DEVICE
    # float32 means float32 here: TF32 keeps ten bits of a product's factors.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if is_dry:
        torch.set_num_threads(1)
    setting = Setting(torch.device("cpu" if is_dry else "cuda:0"), is_dry, seed)
    tell(about=about(setting))
    steps = part.steps(setting)
    tell(steps=[step.name for step in steps])
    for number, step in list(enumerate(steps))[first:]:
        tell(begin=number)
        begin = perf_counter()
        try:
            rows, is_broken = step.run(), False
        except torch.OutOfMemoryError:
            # A figure that this GPU has no room for is no fault; a claim that was not seen is one.
            rows, is_broken = [Row(step.name, "not enough memory on this device")], part.decides
            torch.cuda.empty_cache()
        except Exception as error:
            traceback.print_exc()
            message = " ".join(f"{type(error).__name__}: {error}".split())
            rows, is_broken = [Row(step.name, message[:300])], True
        seconds = perf_counter() - begin
        tell(end=number, rows=[asdict(row) for row in rows], is_broken=is_broken, seconds=seconds)
        if is_broken and is_lost(setting):
            return DEVICE_LOST
    return 0


def is_lost(setting: Setting) -> bool:
    """Whether the device answers nothing any more in this process, as after an illegal access."""
    import torch

    if setting.is_dry:
        return False
    try:
        torch.ones(1, device=setting.device).item()
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def about(setting: Setting) -> dict[str, str]:
    """Device and versions."""
    import numpy
    import torch

    import rollout_pool

    found = {
        "rollout_pool": f"{rollout_pool.__version__} in {Path(str(rollout_pool.__file__)).parents[1]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    for name in ("triton", "transformers", "pydantic"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if setting.is_dry:
        return {"device": f"CPU, {platform.machine()}", **found}
    properties = torch.cuda.get_device_properties(setting.device)
    free, total = torch.cuda.mem_get_info(setting.device)
    return {
        "device": f"{properties.name}, sm_{properties.major}{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors",
        "memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        "cuda": str(torch.version.cuda),
        **found,
    }


def main(part: Part, first: int, is_dry: bool, seed: int) -> None:
    """Ends the process at once: threads and graphs of a part that failed must not keep it."""
    code = work(part, first, is_dry, seed)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
