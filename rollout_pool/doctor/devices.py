"""torch, its GPUs, and Triton."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from rollout_pool.doctor.check import Checks, failed, ok, skipped, warning
from rollout_pool.errors import one_line

DRIVER = Path("/proc/driver/nvidia/version")
KEY_ROWS = 256


@dataclass(frozen=True)
class Gpus:
    """What torch sees in this process."""

    names: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """How many."""
        return len(self.names)


def check_torch(driver: Path = DRIVER) -> Checks[Gpus]:
    """The build, and whether it and the driver of the machine go together."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = f"torch {torch.__version__}, {build}"
    has_driver = driver.exists()
    if torch.version.cuda is None:
        if has_driver:
            yield failed(
                "torch build",
                f"{found}, on a machine with an NVIDIA driver",
                "install a CUDA build of torch; with this one everything runs on cores",
            )
        else:
            yield ok("torch build", f"{found}; no NVIDIA driver here, so all work is done on cores")
        return Gpus()
    if torch.cuda.is_available():
        yield ok("torch build", found)
        return Gpus(tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())))
    if not has_driver:
        yield ok("torch build", f"{found}; no NVIDIA driver here, so all work is done on cores")
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        yield warning(
            "torch build", f"{found}; CUDA_VISIBLE_DEVICES hides all GPUs", "unset CUDA_VISIBLE_DEVICES"
        )
    else:
        yield failed(
            "torch build",
            f"{found}, which cannot use the driver: {_cuda_error()}",
            f"update the driver to one for CUDA {torch.version.cuda}, or install torch for an older CUDA",
        )
    return Gpus()


def check_gpus(gpus: Gpus, asked_for: bool) -> Checks[None]:
    """asked_for: the configuration wants a GPU per actor or rank."""
    if not gpus.number:
        if asked_for:
            yield failed(
                "GPU",
                "the configuration asks for gpus_per_actor above 0, and torch sees no GPU here",
                "set gpus_per_actor: 0 to run on cores, or start this on a machine of the cluster with GPUs",
            )
        else:
            yield skipped("GPU", "none here, and none asked for")
        return
    import torch

    for index, name in enumerate(gpus.names):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        text = f"{name}, sm_{major}{minor}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < total / 2:
            yield warning(f"GPU {index}", text, "another process holds its memory; `nvidia-smi` says which")
        elif f"sm_{major}{minor}" not in torch.cuda.get_arch_list() and major < 8:
            yield failed(f"GPU {index}", text, "this build of torch has no code for it; install an older one")
        else:
            yield ok(f"GPU {index}", text)


def check_triton(gpus: Gpus, asked_for: bool) -> Checks[None]:
    """On a GPU a kernel is compiled, run, and compared with its specification in torch."""
    try:
        import triton
    except ImportError as error:
        what = f"cannot be imported ({one_line(error, 100)})"
        if gpus.number or asked_for:
            yield failed("Triton", what, "pip install triton, in the version that this torch asks for")
        else:
            yield skipped("Triton", f"{what}; on cores the kernels run as torch operations")
        return
    if not gpus.number:
        note = " in its interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else ""
        yield ok("Triton", f"{triton.__version__} can be imported{note}; kernels are compiled on GPUs only")
        return
    import torch

    from rollout_pool.kernels import counter_hash, counter_hash_triton

    keys = torch.arange(2 * KEY_ROWS, dtype=torch.int32, device="cuda").view(KEY_ROWS, 2)
    positions = torch.arange(KEY_ROWS, device="cuda")
    try:
        got = counter_hash_triton.position_keys(keys, positions)
        torch.cuda.synchronize()
    except Exception as error:
        yield failed("Triton", f"a kernel does not run: {one_line(error, 200)}", _way_out(str(error)))
        return
    if torch.equal(got, counter_hash.position_keys(keys, positions)):
        yield ok(
            "Triton",
            f"{triton.__version__}: a kernel compiles, runs, and gives the bits of its specification",
        )
    else:
        yield failed(
            "Triton",
            f"{triton.__version__} computes other bits than torch does",
            "install the version of triton that this torch asks for, and empty ~/.triton/cache",
        )


def _way_out(message: str) -> str:
    if "compiler" in message.lower() or "gcc" in message:
        return "install a C compiler (gcc) and set CC; Triton builds its launcher with it"
    if "Python.h" in message:
        return f"install Python's headers ({sysconfig.get_paths()['include']}), python3-dev say"
    return "empty ~/.triton/cache; install the version of triton that this torch asks for"


def _cuda_error() -> str:
    import torch

    try:
        torch.cuda.init()
    except Exception as error:
        return one_line(error, 200)
    return "no device"
