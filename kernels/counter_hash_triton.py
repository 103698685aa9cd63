"""Triton forms of :mod:`rollout_pool.kernels.counter_hash`: the same int32 arithmetic, bit for bit.

Products wrap around, and shifts are made logical by a mask, as in the torch form.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_pool.kernels import counter_hash
from rollout_pool.kernels.launching import on_device

_MIX_A = tl.constexpr(counter_hash._MIX_A)
_MIX_B = tl.constexpr(counter_hash._MIX_B)
_GOLDEN = tl.constexpr(counter_hash._GOLDEN)
_STEP, _START = tl.constexpr(-(2.0**-31)), tl.constexpr(1.0 - 2.0**-32)

NOISE_BLOCK = 1024


@triton.jit
def mix32(hash_):
    """MurmurHash3's finaliser."""
    hash_ = tl.mul(hash_ ^ ((hash_ >> 16) & 0xFFFF), _MIX_A, sanitize_overflow=False)
    hash_ = tl.mul(hash_ ^ ((hash_ >> 13) & 0x7FFFF), _MIX_B, sanitize_overflow=False)
    return hash_ ^ ((hash_ >> 16) & 0xFFFF)


@triton.jit
def draw_hash(vocab, first_key, second_key):
    """The hash behind one draw. vocab: entries of ``vocabulary_hash``; the keys: of ``position_keys``."""
    hash_ = tl.mul(vocab ^ first_key, _MIX_A, sanitize_overflow=False)
    hash_ = tl.mul((hash_ ^ ((hash_ >> 15) & 0x1FFFF)) ^ second_key, _MIX_B, sanitize_overflow=False)
    return hash_ ^ ((hash_ >> 16) & 0xFFFF)


@triton.jit
def exponential(hash_):
    """The standard exponential variate of a hash; exact in float64 up to the logarithm."""
    remainder = (hash_ & 0x7FFFFFFF).to(tl.float64) * _STEP + _START
    return (-tl.log(remainder)).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def position_keys_kernel(keys, positions, out, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    position = tl.load(positions + row, mask=inside, other=0).to(tl.int32)
    step = mix32(tl.mul(position + 1, _GOLDEN, sanitize_overflow=False))
    first = mix32(tl.load(keys + 2 * row, mask=inside, other=0) ^ step)
    second = tl.load(keys + 2 * row + 1, mask=inside, other=0)
    second = mix32(tl.add(second, first, sanitize_overflow=False))
    tl.store(out + 2 * row, first, mask=inside)
    tl.store(out + 2 * row + 1, second, mask=inside)


@triton.jit
def noise_kernel(vocab, keys, out, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    hash_ = draw_hash(tl.load(vocab + ids, mask=inside), tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
    tl.store(out + row * vocab_size + ids, exponential(hash_), mask=inside)


def position_keys(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See :func:`rollout_pool.kernels.counter_hash.position_keys`."""
    keys = keys.contiguous()
    out = torch.empty_like(keys)
    with on_device(keys):
        grid = (triton.cdiv(keys.shape[0], 128),)
        position_keys_kernel[grid](
            keys, positions.contiguous(), out, keys.shape[0], BLOCK=128, enable_fp_fusion=False
        )  # fmt: skip
    return out


def exponential_noise(vocab: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """See :func:`rollout_pool.kernels.counter_hash.exponential_noise`; sampling makes its noise inside."""
    keys = keys.contiguous()
    out = torch.empty(keys.shape[0], vocab.shape[0], dtype=torch.float32, device=keys.device)
    with on_device(keys):
        grid = (triton.cdiv(vocab.shape[0], NOISE_BLOCK), keys.shape[0])
        noise_kernel[grid](vocab, keys, out, vocab.shape[0], BLOCK=NOISE_BLOCK, enable_fp_fusion=False)
    return out
