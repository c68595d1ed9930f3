"""What the host knows of a step before any launch: its stamp, tiles, and the forms' constants."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-untyped]

from shoal.kernels.row_form import RowForm, SegmentForm
from shoal.kernels.row_rounding import rounding_domain, storage_of
from shoal.kernels.row_tiles import power_of_2
from shoal.kernels.step_rules import KernelRule, kernel_rule
from shoal.rules.compressors import OneBit

__all__ = [
    "MOST_COLUMNS",
    "Stamp",
    "StepForm",
    "columns_of_tile",
    "forget_forms",
    "programs_of",
    "rows_of_tile",
    "step_form",
]

MOST_COLUMNS = 1024  # of a tile
_TILE_BYTES = 4096
_MOST_ROWS = 128
_WARPS = 4
# On each multiprocessor: far more than it holds, so that the last ones leave it idle briefly.
_PROGRAMS = 64
_INTERPRETED_PROGRAMS = 3
_FORMS_KEPT = 256


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a step knows beside rows and gradients.

    epoch: version that stepped rows get; event_time_s: at most 2^32 - 1; nan_policy: "raise" and
    "skip" leave a row with a non-finite sum as it is and count it, "clip" puts 0 for NaN and
    nan_clip, with the sign, for infinities.
    """

    epoch: int
    event_time_s: int
    global_step: int
    nan_policy: str = "raise"
    nan_clip: float = 1.0

    @property
    def clip(self) -> float:
        """`nan_clip`, or -1 where nothing is clipped, -2 where that is an alarm besides."""
        if self.nan_policy == "clip":
            return self.nan_clip
        return -2.0 if self.nan_policy == "raise" else -1.0

    @property
    def domain(self) -> int:
        """The word that keys the step's rounding."""
        return rounding_domain(self.global_step)


@dataclass(frozen=True, slots=True)
class StepForm:
    """What launches want to know of a row form.

    real: Triton's dtype of arithmetic; pitch: elements from one row of sums to the next, D padded
    to 16 bytes; fused: the one segment's constants where a launch can sum and step in one go;
    segments: constants of each segment's launch, None where plain torch has to step it.
    """

    form: RowForm
    real: Any
    pitch: int
    largest: float
    fused: dict[str, Any] | None
    segments: tuple[dict[str, Any] | None, ...]


_forms: dict[int, StepForm] = {}


def step_form(form: RowForm) -> StepForm:
    """The constants of a form, made once for each form object."""
    kept = _forms.get(id(form))
    if kept is not None:
        return kept
    unit = 16 // form.real.itemsize
    segments = tuple(_constants(form, segment) for segment in form.segments)
    made = StepForm(
        form=form,
        real=_real(form),
        pitch=(form.dim + unit - 1) // unit * unit,
        largest=torch.finfo(form.real).max,
        fused=segments[0] if len(segments) == 1 else None,
        segments=segments,
    )
    if len(_forms) >= _FORMS_KEPT:
        _forms.clear()
    # The value holds its form, so the identity in the key stays taken.
    _forms[id(form)] = made
    return made


def forget_forms() -> None:
    """Make all constants anew, for other tile shapes."""
    _forms.clear()
    _programs_of.cache_clear()


def columns_of_tile(dim: int) -> int:
    """Columns of a tile: a whole row of `dim` columns if they are no more than MOST_COLUMNS."""
    return min(power_of_2(dim), MOST_COLUMNS)


def rows_of_tile(dim: int, real: torch.dtype, most: int = _MOST_ROWS, size: int = 1) -> int:
    """Rows of a tile of `size` times the usual bytes."""
    return min(max(size * _TILE_BYTES // real.itemsize // columns_of_tile(dim), 1), most)


def programs_of(most: int, device: torch.device) -> int:
    """Programs that share work of which the host knows a bound only."""
    return min(most, _programs_of(device))


@functools.cache
def _programs_of(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _real(form: RowForm) -> Any:
    return tl.float64 if form.real is torch.float64 else tl.float32


def _constants(form: RowForm, segment: SegmentForm) -> dict[str, Any] | None:
    if isinstance(segment.compressor, OneBit) or segment.dim > MOST_COLUMNS:
        return None
    rule: KernelRule | None = kernel_rule(segment.optimizer, form.real)
    if rule is None:
        return None
    return {
        "DIM": segment.dim,
        "RATE": segment.rate,
        "WEIGHT_BYTES": form.weight_bytes,
        "STATE_BYTES": form.state_bytes,
        "STORAGE": storage_of(form.dtype),
        "REAL": _real(form),
        "VECTORS": rule.vectors,
        "SCALARS": rule.scalars,
        "RULE": rule.number,
        **dict(zip("ABCDEFG", rule.params, strict=True)),
        "ROWS": rows_of_tile(segment.dim, form.real),
        "BLOCK_D": columns_of_tile(segment.dim),
        "SHIFT": form.shift,
        "num_warps": _WARPS,
        # As the compiled core and the reference round: each operation by itself.
        "enable_fp_fusion": False,
    }
