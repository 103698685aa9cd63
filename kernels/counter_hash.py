"""Counter-based randomness: every draw is a pure function of its coordinates.

The coordinates are (seed, request identity, sample index, token position, vocabulary id). The first
three are hashed once per sample on the host into two 32-bit words, its *key*; the rest is 32-bit
integer arithmetic that wraps around, so that torch, Triton and plain Python give the same bits on any
device. No global generator, no state: a replayed sample draws exactly what it drew before.

The finaliser is MurmurHash3's ``fmix32`` (Austin Appleby, public domain). All tensors are int32 and
shifts are logical, which int32 needs a mask for.
"""

from __future__ import annotations

import hashlib

import torch

_MIX_A = -2048144789  # 0x85EBCA6B
_MIX_B = -1028477387  # 0xC2B2AE35
_GOLDEN = -1640531527  # 0x9E3779B9
_LOW = {13: 0x7FFFF, 15: 0x1FFFF, 16: 0xFFFF}
"""What a logical right shift by the key leaves: the mask that undoes the sign extension."""


def sample_key(seed: int, identity: str, sample_index: int) -> tuple[int, int]:
    """Two signed 32-bit words that stand for one sample in every draw it makes."""
    digest = hashlib.blake2b(f"{seed}|{sample_index}|{identity}".encode(), digest_size=8).digest()
    low, high = digest[:4], digest[4:]
    return int.from_bytes(low, "little", signed=True), int.from_bytes(high, "little", signed=True)


def mix32_(hash_: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser on an int32 tensor, in place."""
    _xor_shift_(hash_, 16).mul_(_MIX_A)
    _xor_shift_(hash_, 13).mul_(_MIX_B)
    return _xor_shift_(hash_, 16)


def vocabulary_hash(vocab_size: int, device: torch.device) -> torch.Tensor:
    """The part of every draw that depends on the vocabulary id alone: int32 ``[vocab]``."""
    ids = torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device)
    return mix32_(ids.mul_(_GOLDEN))


def position_keys(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Mix the token position into each row's key: int32 ``[rows, 2]``.

    keys: int32 ``[rows, 2]`` from :func:`sample_key`. positions: ``[rows]``, the number of new tokens
    that the sample already has.
    """
    step = mix32_(positions.to(torch.int32).add(1).mul_(_GOLDEN))
    first = mix32_(keys[:, 0] ^ step)
    second = mix32_(keys[:, 1] + first)
    return torch.stack((first, second), dim=1)


def draw_bits(vocab: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """31 random bits for every row and id: int32 ``[rows, vocab]``, none below zero.

    vocab: :func:`vocabulary_hash`, of all ids or, ``[rows, ids]``, of some. keys: :func:`position_keys`.
    """
    return _xor_shift_(_mixed(vocab, keys), 16).bitwise_and_(0x7FFFFFFF)


def least_bits(vocab: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What :func:`draw_bits` are at least, in fewer passes: their upper 15, and zeros below."""
    return _mixed(vocab, keys).bitwise_and_(0x7FFF0000)


def _mixed(vocab: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What :func:`draw_bits` are made of; its last step changes no bit but the lower 16."""
    hash_ = vocab ^ keys[:, :1]
    hash_.mul_(_MIX_A)
    _xor_shift_(hash_, 15)
    return hash_.bitwise_xor_(keys[:, 1:]).mul_(_MIX_B)


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """Standard exponential variates from :func:`draw_bits`: float32, all finite and above zero.

    The minimum over ids of E / weight is a draw in proportion to the weights; -log(E) is a Gumbel variate.

    E is -log(1 - u) with u = (bits + 1/2) / 2**31. 1 - u is exact in float64, and near it the logarithm
    keeps the full resolution of the smallest E, where the winner of a large vocabulary is found. Rounded to
    float32 the result is the same in every math library whose float64 logarithm is good to an ulp, but for
    about one draw in 2**28.
    """
    remainder = bits.to(torch.float64)
    remainder.mul_(-(2.0**-31)).add_(1.0 - 2.0**-32)
    return remainder.log_().neg_().to(torch.float32)


def exponential_noise(vocab: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """:func:`exponential` variates of all ids: float32 ``[rows, vocab]``."""
    return exponential(draw_bits(vocab, keys))


def _xor_shift_(hash_: torch.Tensor, bits: int) -> torch.Tensor:
    return hash_.bitwise_xor_((hash_ >> bits).bitwise_and_(_LOW[bits]))
