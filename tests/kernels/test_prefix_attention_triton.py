"""Attention to shared prompts and to a row's own cells, against attention over all of them in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout_pool.kernels import attention_triton, prefix_attention_triton, prefix_reference, reference
from rollout_pool.kernels.prefix_reference import PrefixRows

TOLERANCE = {torch.float32: 6e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SPLIT = 64
PROMPTS = [70, 1, 130]
"""Over two splits, one cell, over three."""
MEMBERS = [[0, 3, 4, 5, 6, 7, 8, 9], [1], [11, 2]]
"""More rows than one tile has; one; not in order. Row 10 shares nothing."""
OWN = [1, 7, 3, 64, 65, 2, 1, 1, 9, 20, 5, 1]
HEADS = {"grouped": (6, 2), "one each": (3, 3), "one for all": (5, 1)}
DIMS = {"16": (16, 16), "odd": (33, 7), "wider values": (24, 40)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "soft-cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "everything": {"window": 75, "softcap": 3.0, "sinks": True},
}
FORMS = {"triton": (prefix_attention_triton, attention_triton), "torch": (prefix_reference, reference)}

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of the interpreter


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "SPLIT", 32)
    monkeypatch.setattr(prefix_attention_triton, "SPLIT", SPLIT)


class Case:
    """Random prompts and slots; every row's cells also in one piece. A window drops a prompt's first cells."""

    def __init__(
        self,
        heads: tuple[int, int],
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(sum((*heads, *dims)))
        (num_heads, kv_heads), (key_dim, value_dim) = heads, dims

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        self.query = randn(len(OWN), 1, num_heads, key_dim).transpose(1, 2)
        self.slots = randn(len(OWN), kv_heads, 72, key_dim), randn(len(OWN), kv_heads, 72, value_dim)
        # What a sliding layer keeps of a prompt is cut out of all of it.
        whole = [
            (randn(1, kv_heads, size + 5, key_dim), randn(1, kv_heads, size + 5, value_dim))
            for size in PROMPTS
        ]
        self.prompts = [(keys[:, :, 5:], values[:, :, 5:]) for keys, values in whole]
        self.lengths = torch.tensor(OWN, device=device)
        self.options: dict[str, Any] = {"scaling": 0.2, "softcap": softcap}
        self.sinks = randn(num_heads) if sinks else None
        self.window = window
        numbers = tuple(row for group in MEMBERS for row in group)
        self.groups = PrefixRows(torch.tensor(numbers, device=device), (0, 8, 9, 11), numbers)

    def run(self, form: str, apart: bool = False) -> torch.Tensor:
        prefix_form, own_form = FORMS[form]
        keys, values = ([prompt[i] for prompt in self.prompts] for i in (0, 1))
        seen = None if self.window is None else (self.window - self.lengths).clamp_min(0)
        prior = prefix_form.prefix_attention(
            self.query, keys, values, self.groups, seen=seen, apart=apart, **self.options
        )
        return own_form.decode_attention(
            self.query, *self.slots, self.lengths, sinks=self.sinks, window=self.window, prior=prior,
            **self.options,
        )  # fmt: skip

    def expected(self) -> torch.Tensor:
        """Row by row, in float32, over the prompt's cells and the row's own in one piece."""
        found = []
        prompt_of = {row: self.prompts[number] for number, group in enumerate(MEMBERS) for row in group}
        for row, size in enumerate(OWN):
            pieces = [tuple(slot[row : row + 1, :, :size] for slot in self.slots)]
            pieces = [prompt_of[row], *pieces] if row in prompt_of else pieces
            keys, values = (torch.cat([piece[i] for piece in pieces], dim=2).float() for i in (0, 1))
            length = torch.tensor([keys.shape[2]], device=keys.device)
            sinks = None if self.sinks is None else self.sinks.float()
            query, window = self.query[row : row + 1].float(), self.window
            out = reference.decode_attention(
                query, keys, values, length, sinks=sinks, window=window, **self.options
            )  # fmt: skip
            found.append(out)
        return torch.cat(found)


def check(case: Case, form: str, dtype: torch.dtype) -> None:
    got = case.run(form)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), case.expected(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("form", FORMS)
def test_two_places_add_up_to_one(
    form: str, options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    check(Case(HEADS["grouped"], DIMS["odd"], dtype, device, **options), form, dtype)


@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS.keys())
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("form", FORMS)
def test_every_grouping_with_every_head_dim(
    form: str, heads: tuple[int, int], dims: tuple[int, int], device: torch.device
) -> None:
    check(Case(heads, dims, torch.float32, device, **OPTIONS["everything"]), form, torch.float32)


@pytest.mark.parametrize("options", ["plain", "everything"])
@pytest.mark.parametrize("form", FORMS)
def test_a_rows_bits_do_not_depend_on_its_siblings(form: str, options: str, device: torch.device) -> None:
    case = Case(HEADS["grouped"], DIMS["16"], torch.float32, device, **OPTIONS[options])
    together = case.run(form, apart=True)
    for kept in ([[0], [1], [11]], [[9, 4, 3], [1], [2]]):
        numbers = tuple(row for group in kept for row in group)
        starts = (0, len(kept[0]), len(kept[0]) + 1, len(numbers))
        case.groups = PrefixRows(torch.tensor(numbers, device=device), starts, numbers)
        fewer = case.run(form, apart=True)
        for row in numbers:
            assert torch.equal(fewer[row], together[row])


def test_what_triton_cannot_do_is_refused(device: torch.device) -> None:
    case = Case(HEADS["grouped"], DIMS["16"], torch.float32, device)
    wide = torch.zeros(1, 1, 1, 600, device=device)
    groups = PrefixRows(torch.zeros(1, dtype=torch.int64, device=device), (0, 1), (0,))
    with pytest.raises(ValueError, match="head dims up to 512"):
        prefix_attention_triton.prefix_attention(wide, [wide], [wide], groups, scaling=1.0)
    cut = [(keys[..., :8], values) for keys, values in case.prompts]
    with pytest.raises(ValueError, match="contiguous"):
        prefix_attention_triton.prefix_attention(
            case.query, [one[0] for one in cut], [one[1] for one in cut], case.groups, scaling=1.0
        )
