"""Triton decode attention against its reference in float32, with every cell that no row sees poisoned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout_pool.kernels import attention_triton, reference

TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SPLIT = 64
LENGTHS = [1, 63, 64, 65, 150]
"""Within a split, at its end, over several."""
HEADS = {"grouped": (6, 2), "one each": (3, 3), "one for all": (5, 1)}
DIMS = {"16": (16, 16), "odd": (33, 7), "wider values": (24, 40), "two blocks": (80, 64)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "narrow window": {"window": 1},
    "window per row": {"window": [1, 5, 200, 64, 100]},
    "soft-cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "everything": {"window": 90, "softcap": 3.0, "sinks": True},
}


pytestmark = [
    pytest.mark.usefixtures("guarded_outputs"),
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),  # numpy's, of the interpreter
]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "SPLIT", SPLIT)


class Case:
    """Random tensors; the cache is a cut out of a larger one, and the query a transposed view."""

    def __init__(
        self,
        heads: tuple[int, int],
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(sum((*heads, *dims)))
        rows, view = len(LENGTHS), 160
        (num_heads, kv_heads), (key_dim, value_dim) = heads, dims

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        self.query = randn(rows, 1, num_heads, key_dim).transpose(1, 2)
        self.keys = randn(rows + 1, kv_heads, view + 9, key_dim)[:rows, :, :view]
        self.values = randn(rows + 1, kv_heads, view + 9, value_dim)[:rows, :, :view]
        self.lengths = torch.tensor(LENGTHS, device=device)
        self.options: dict[str, Any] = {"scaling": 0.2, **options}
        if options.get("sinks"):
            self.options["sinks"] = randn(num_heads)
        if isinstance(options.get("window"), list):
            self.options["window"] = torch.tensor(options["window"], device=device)

    def expected(self) -> torch.Tensor:
        options = {
            name: value.float() if name == "sinks" and value is not None else value
            for name, value in self.options.items()
        }
        query, keys, values = (tensor.float() for tensor in (self.query, self.keys, self.values))
        return reference.decode_attention(query, keys, values, self.lengths, **options)

    def poison(self) -> None:
        """Not a number wherever no row may look."""
        visible = reference.visible_cells(self.lengths, self.options.get("window"), self.keys.shape[2])
        unseen = ~visible.transpose(2, 3)
        self.keys.masked_fill_(unseen, float("nan"))
        self.values.masked_fill_(unseen, float("nan"))

    def run(self, rows: slice = slice(None), view: int | None = None) -> torch.Tensor:
        window = self.options.get("window")
        options = {**self.options, "window": window[rows] if isinstance(window, torch.Tensor) else window}
        keys, values = (cache[rows, :, :view] for cache in (self.keys, self.values))
        return attention_triton.decode_attention(
            self.query[rows], keys, values, self.lengths[rows], **options
        )


def check(case: Case, dtype: torch.dtype) -> None:
    expected = case.expected()
    case.poison()
    got = case.run()
    assert got.dtype == dtype
    assert got.shape == expected.shape
    torch.testing.assert_close(got.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_in_every_dtype(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    check(Case(HEADS["grouped"], DIMS["odd"], dtype, device, **options), dtype)


@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS.keys())
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_every_grouping_with_every_head_dim(
    heads: tuple[int, int], dims: tuple[int, int], device: torch.device
) -> None:
    check(Case(heads, dims, torch.float32, device, **OPTIONS["everything"]), torch.float32)


@pytest.mark.parametrize("options", ["plain", "everything", "window per row"])
def test_a_rows_bits_are_its_own(options: str, device: torch.device) -> None:
    """Alone or with others, in a shorter view or a longer one: equal bits."""
    case = Case(HEADS["grouped"], DIMS["16"], torch.float32, device, **OPTIONS[options])
    together = case.run()
    for row, length in enumerate(LENGTHS):
        alone = case.run(slice(row, row + 1), view=length)
        assert torch.equal(alone[0], together[row])


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    case = Case(HEADS["grouped"], DIMS["16"], torch.float32, device, softcap=30.0)
    case.keys.mul_(1e4)
    check(case, torch.float32)


def test_what_it_cannot_do_is_refused(device: torch.device) -> None:
    case = Case(HEADS["grouped"], DIMS["16"], torch.float32, device)
    case.run()
    with pytest.raises(ValueError, match="not a mask"):
        attention_triton.decode_attention(case.query, case.keys, case.values, scaling=1.0)
    with pytest.raises(ValueError, match="contiguous"):
        attention_triton.decode_attention(
            case.query, case.keys[..., :8], case.values, case.lengths, scaling=1.0
        )
    wide = torch.zeros(1, 1, 1, 600, device=device)
    with pytest.raises(ValueError, match="head dims up to 512"):
        attention_triton.decode_attention(wide, wide, wide, case.lengths[:1], scaling=1.0)
