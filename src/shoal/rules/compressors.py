"""How rows are stored for serving, and what training sees of it.

Float32 and Float16 act at export only. FixedR8 and OneBit also quantise in training's forward
pass (`retrieve`), so that the model learns with what serving will read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.rules import checks

__all__ = ["Compressor", "FixedR8", "Float16", "Float32", "OneBit"]


class Compressor(ABC):
    """Storage of one segment's weights on a serving replica, and its shadow in training."""

    __slots__ = ()

    kind: ClassVar[str]

    @abstractmethod
    def retrieve(self, w_ND: Tensor, global_step: int) -> Tensor:
        """What training's forward pass reads for stored weights; dtype and shape kept."""

    @abstractmethod
    def retrieve_backward(self, w_ND: Tensor, grad_ND: Tensor, global_step: int) -> Tensor:
        """The gradient of the stored weights, given that of `retrieve`'s result."""

    @abstractmethod
    def encode(self, w_ND: Tensor) -> Tensor:
        """Stored form for serving, same shape, one element per weight."""

    @abstractmethod
    def decode(self, code_ND: Tensor) -> Tensor:
        """float32 weights of the stored form."""

    @abstractmethod
    def core_params(self) -> dict[str, float]:
        """The numbers the compiled core gets, by field name."""


@dataclass(frozen=True, slots=True)
class Float32(Compressor):
    """4 bytes a weight; the identity."""

    kind: ClassVar[str] = "float32"

    def retrieve(self, w_ND: Tensor, global_step: int) -> Tensor:
        return w_ND

    def retrieve_backward(self, w_ND: Tensor, grad_ND: Tensor, global_step: int) -> Tensor:
        return grad_ND

    def encode(self, w_ND: Tensor) -> Tensor:
        return w_ND.to(torch.float32)

    def decode(self, code_ND: Tensor) -> Tensor:
        return code_ND.to(torch.float32)

    def core_params(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True, slots=True)
class Float16(Compressor):
    """2 bytes a weight, rounded to nearest even at export; training sees full weights."""

    kind: ClassVar[str] = "float16"

    def retrieve(self, w_ND: Tensor, global_step: int) -> Tensor:
        return w_ND

    def retrieve_backward(self, w_ND: Tensor, grad_ND: Tensor, global_step: int) -> Tensor:
        return grad_ND

    def encode(self, w_ND: Tensor) -> Tensor:
        return w_ND.to(torch.float16)

    def decode(self, code_ND: Tensor) -> Tensor:
        return code_ND.to(torch.float32)

    def core_params(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True, slots=True)
class FixedR8(Compressor):
    """1 byte a weight on a fixed grid of [-r, r): int8 multiples of r / 128.

    code = w / (r / 128) rounded half away from zero, clamped to [-128, 127], NaN to 0. Training's
    forward reads code * (r / 128); backward is the identity, also outside the grid.
    """

    r: float = 1.0

    kind: ClassVar[str] = "fixed_r8"

    def __post_init__(self) -> None:
        checks.positive(self, "r", self.r)

    def retrieve(self, w_ND: Tensor, global_step: int) -> Tensor:
        return self._codes(w_ND) * (self.r / 128)

    def retrieve_backward(self, w_ND: Tensor, grad_ND: Tensor, global_step: int) -> Tensor:
        return grad_ND

    def encode(self, w_ND: Tensor) -> Tensor:
        return self._codes(w_ND).to(torch.int8)

    def decode(self, code_ND: Tensor) -> Tensor:
        return code_ND.to(torch.float32) * (self.r / 128)

    def core_params(self) -> dict[str, float]:
        return {"r": float(self.r)}

    def _codes(self, w_ND: Tensor) -> Tensor:
        scaled_ND = w_ND / w_ND.new_tensor(self.r / 128)
        whole_ND = scaled_ND.trunc()
        # Adding 0.5 and flooring would round 0.49999997 up; the fraction itself is exact.
        half_ND = (scaled_ND - whole_ND).abs() >= 0.5
        codes_ND = whole_ND + torch.where(half_ND, scaled_ND.sign(), torch.zeros_like(scaled_ND))
        return codes_ND.clamp(-128, 127).nan_to_num(nan=0.0)


@dataclass(frozen=True, slots=True)
class OneBit(Compressor):
    """1 sign a weight, learnt through a tanh that sharpens with training (HashNet, Cao 2017).

    Forward amplitude * tanh(scale * w), backward g * amplitude * scale * (1 - tanh^2), with
    scale(step) = min(init_scale * sqrt(1 + 0.005 * s), max_scale) and s = step rounded down to a
    multiple of step_size. Serving stores -1 or 1 (0 counts as 1) and reads it times amplitude.
    """

    step_size: int = 200
    init_scale: float = 1.0
    max_scale: float = 10000.0
    amplitude: float = 0.1

    kind: ClassVar[str] = "one_bit"

    def __post_init__(self) -> None:
        checks.whole(self, "step_size", self.step_size, 1)
        checks.positive(self, "init_scale", self.init_scale)
        checks.at_least(self, "max_scale", self.max_scale, self.init_scale)
        checks.positive(self, "amplitude", self.amplitude)

    def scale(self, global_step: int) -> float:
        """Steepness of the tanh: a function of the step alone, so nothing needs saving."""
        held = global_step - global_step % self.step_size
        return min(self.init_scale * math.sqrt(1 + 0.005 * held), self.max_scale)

    def retrieve(self, w_ND: Tensor, global_step: int) -> Tensor:
        return self.amplitude * torch.tanh(self.scale(global_step) * w_ND)

    def retrieve_backward(self, w_ND: Tensor, grad_ND: Tensor, global_step: int) -> Tensor:
        scale = self.scale(global_step)
        tanh_ND = torch.tanh(scale * w_ND)
        return grad_ND * (self.amplitude * scale) * (1 - tanh_ND * tanh_ND)

    def encode(self, w_ND: Tensor) -> Tensor:
        plus = torch.ones_like(w_ND, dtype=torch.int8)
        return torch.where(w_ND < 0, -plus, plus)

    def decode(self, code_ND: Tensor) -> Tensor:
        return code_ND.to(torch.float32) * self.amplitude

    def core_params(self) -> dict[str, float]:
        return {
            "step_size": float(self.step_size),
            "init_scale": float(self.init_scale),
            "max_scale": float(self.max_scale),
            "amplitude": float(self.amplitude),
        }
