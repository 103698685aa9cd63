"""DeepSpeed's AutoTP as a way to split a model that has no plan.

AutoTP goes by the names of layers, so that what it makes of a new model is a guess: the split model is
compared with the whole one on a few tokens before it is used.
"""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rollout_pool.actors.loaded_weights import load_whole
from rollout_pool.actors.rank_group import RankGroup
from rollout_pool.errors import ConfigError, UnsupportedModelError

PROBE_LENGTH = 8
EXACT, ROUNDED = 1e-3, 0.2  # largest difference of a logit, in standard deviations of the logits


def load_by_auto_tp(name: str, group: RankGroup, options: dict[str, Any]) -> PreTrainedModel:
    """Load the whole model on the host, and keep this rank's part of it on ``group.device``.

    Linear layers are split by output, those before a sum and the head by input; embeddings stay whole.
    """
    deepspeed = _import_deepspeed(group.device)
    model = load_whole(name, **options).eval()
    whole = _probe(model)
    parallel = {"tp_size": group.size, "tp_group": dist.group.WORLD, "tp_grain_size": 1}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            engine = deepspeed.init_inference(
                model, tensor_parallel=parallel, dtype=model.dtype, replace_with_kernel_inject=False
            )
        split: PreTrainedModel = engine.module.eval()
        difference = float((_probe(split) - whole).abs().max() / whole.std())
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnsupportedModelError(f"model {name!r}: DeepSpeed cannot split it: {reason}") from error
    limit = EXACT if model.dtype == torch.float32 else ROUNDED
    if not difference <= limit:
        raise UnsupportedModelError(
            f"model {name!r}: DeepSpeed splits it wrongly: its logits are off by {difference:.2g} of their "
            "standard deviation; use tensor_parallel_size: 1"
        )
    return split


def _import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, told which device, and kept from compiling.

    On CPUs it would compile an operator for sums in shared memory when it is first used: that needs a
    compiler, waits for ever for one that was killed, and serves one host only. Gloo does the sums instead.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed.inference.engine import InferenceEngine
        from deepspeed.ops import __compatible_ops__ as compatible
    except ImportError as error:
        raise ConfigError(
            "tensor_parallel_backend: deepspeed needs DeepSpeed; install it with pip install "
            "'rollout-pool[deepspeed]'"
        ) from error
    compatible["deepspeed_shm_comm"] = False
    InferenceEngine.inference_mp_group = None  # of a group that this process has left
    return deepspeed


def _probe(model: PreTrainedModel) -> torch.Tensor:
    """Logits of a few tokens: float32 ``[tokens, vocab]`` on the host."""
    vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, PROBE_LENGTH + 1).remainder(vocabulary).unsqueeze(0)
    device = next(model.parameters()).device
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids.to(device), use_cache=False).logits[0]
    return logits.float().cpu()
