"""The kernels that the engine calls. Each has one implementation per device, behind one signature."""

from rollout_pool.kernels.counter_hash import position_keys, sample_key, vocabulary_hash
from rollout_pool.kernels.reference import (
    SamplingRows,
    compact_kv,
    decode_attention,
    expand_kv,
    move_rows,
    rows_of,
    sample_tokens,
    write_kv,
)

__all__ = [
    "SamplingRows",
    "compact_kv",
    "decode_attention",
    "expand_kv",
    "move_rows",
    "position_keys",
    "rows_of",
    "sample_key",
    "sample_tokens",
    "vocabulary_hash",
    "write_kv",
]
