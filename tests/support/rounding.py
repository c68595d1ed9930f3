"""Stochastic rounding of updated weights to 16-bit rows; fixes the bits for every backend."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.errors import DTypeError
from shoal.rules.initializers import column_words

_FLOAT16_MAX = 65504.0


def rounding_domain(global_step: int) -> int:
    """The fourth Philox counter word of a step's rounding: 2 * (global_step mod 2^31) + 1.

    Odd, so that it never meets the words of initial values (domain 0).
    """
    return ((global_step % (1 << 31)) << 1) | 1


def stochastic_round(
    values_UD: Tensor,
    dtype: torch.dtype,
    *,
    key: int,
    ids_U: Tensor,
    column_start: int,
    global_step: int,
) -> Tensor:
    """Round float32 to one of the two nearest 16-bit values, nearer ones more often.

    x is a value, r its random word: lane c % 4 of Philox4x32-10 under `key` at counter (id low
    word, id high word, c // 4, rounding_domain(global_step)), c the column counted from the
    row's first.

    bfloat16: b = bits of x as uint32; the result is the upper 16 bits of b + (r & 0xffff). A
    finite x above bfloat16's largest value may round to infinity.

    float16, steps in this order:
      1. |x| > 65504 is converted plainly, so it is 65504 or infinity.
      2. y = x converted to float16, ties to even. If y == x the result is y (so -0.0 stays).
      3. t = bits of y without its sign; if |y| > |x|, t -= 1. Now t and t + 1 are the
         magnitudes around |x|; with x's sign put back, call the smaller value lo, the larger hi.
         A zero magnitude keeps x's sign.
      4. hi if (r >> 8) * 2^-24 < (x - lo) / (hi - lo), else lo; lo and hi as float32, each
         operation rounded to float32.

    Either: NaN and infinities are converted plainly. Plain conversion is to nearest, ties to even.

    Args:
        values_UD: float32 [U, D], columns column_start .. column_start + D - 1 of their rows.
        dtype: torch.bfloat16 or torch.float16.
        key: `initializers.stream_key(seed, table)`.
        ids_U: int64 [U].
        column_start: first column in the row.
        global_step: optimizer steps done before this one.

    Raises:
        DTypeError: values are not float32, or dtype is neither of the two.
    """
    if values_UD.dtype != torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        raise DTypeError(
            "dtypes of stochastic rounding",
            got=f"{values_UD.dtype} to {dtype}",
            allowed="float32 to bfloat16 or float16",
            remedy="Compute the step in float32; only 16-bit rows are rounded.",
        )
    words_UD = column_words(
        ids_U,
        key=key,
        column_start=column_start,
        dim=values_UD.shape[1],
        domain=rounding_domain(global_step),
    )
    rounded = _to_bfloat16 if dtype == torch.bfloat16 else _to_float16
    return torch.where(values_UD.isfinite(), rounded(values_UD, words_UD), values_UD.to(dtype))


def _to_bfloat16(values_UD: Tensor, words_UD: Tensor) -> Tensor:
    bits_UD = values_UD.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    upper_UD = ((bits_UD + (words_UD & 0xFFFF)) >> 16) & 0xFFFF
    return upper_UD.to(torch.int16).view(torch.bfloat16)


def _to_float16(values_UD: Tensor, words_UD: Tensor) -> Tensor:
    x_UD = values_UD
    near_UD = x_UD.to(torch.float16)
    near_bits_UD = near_UD.view(torch.int16).to(torch.int64)
    sign_UD = near_bits_UD & 0x8000
    under_UD = (near_bits_UD & 0x7FFF) - (near_UD.to(torch.float32).abs() > x_UD.abs()).long()
    toward_UD, away_UD = _half(under_UD | sign_UD), _half((under_UD + 1) | sign_UD)
    negative_UD = sign_UD != 0
    low_UD = torch.where(negative_UD, away_UD, toward_UD)
    high_UD = torch.where(negative_UD, toward_UD, away_UD)
    low32_UD, high32_UD = low_UD.to(torch.float32), high_UD.to(torch.float32)
    unit_UD = (words_UD >> 8).to(torch.float32) * 2.0**-24
    up_UD = unit_UD < (x_UD - low32_UD) / (high32_UD - low32_UD)
    kept_UD = (near_UD.to(torch.float32) == x_UD) | (x_UD.abs() > _FLOAT16_MAX)
    return torch.where(kept_UD, near_UD, torch.where(up_UD, high_UD, low_UD))


def _half(bits: Tensor) -> Tensor:
    """float16 of the low 16 bits of an int64 tensor."""
    return bits.to(torch.int16).view(torch.float16)
