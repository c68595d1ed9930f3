"""How rows are stored for serving, and what training sees of it.

Float32 and Float16 act at export only. FixedR8 and OneBit also quantise in training's forward
pass (`retrieve`), so that the model learns with what serving will read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.rules.rule import Positive, Rule, Steps, at_least, check

__all__ = ["Compressor", "FixedR8", "Float16", "Float32", "OneBit"]


class Compressor(Rule, ABC):
    """Storage of one segment's weights on a serving replica, and its shadow in training."""

    __slots__ = ()

    def retrieve(self, w_ND: Tensor, global_step: int) -> Tensor:
        """What training's forward pass reads for stored weights; dtype and shape kept."""
        return w_ND

    def retrieve_backward(self, w_ND: Tensor, grad_ND: Tensor, global_step: int) -> Tensor:
        """The gradient of the stored weights, given that of `retrieve`'s result."""
        return grad_ND

    @abstractmethod
    def encode(self, w_ND: Tensor) -> Tensor:
        """Stored form for serving, same shape, one element per weight."""

    def decode(self, code_ND: Tensor) -> Tensor:
        """float32 weights of the stored form."""
        return code_ND.to(torch.float32)


@dataclass(frozen=True, slots=True)
class Float32(Compressor):
    """4 bytes a weight; the identity."""

    kind = "float32"

    def encode(self, w_ND: Tensor) -> Tensor:
        return w_ND.to(torch.float32)


@dataclass(frozen=True, slots=True)
class Float16(Compressor):
    """2 bytes a weight, rounded to nearest even at export; training sees full weights."""

    kind = "float16"

    def encode(self, w_ND: Tensor) -> Tensor:
        return w_ND.to(torch.float16)


@dataclass(frozen=True, slots=True)
class FixedR8(Compressor):
    """1 byte a weight on a fixed grid of [-r, r): int8 multiples of r / 128.

    code = w / (r / 128) rounded half away from zero, clamped to [-128, 127], NaN to 0. Training's
    forward reads code * (r / 128); backward is the identity, also outside the grid.
    """

    kind = "fixed_r8"
    params = ("r",)

    r: Positive = 1.0

    def retrieve(self, w_ND: Tensor, global_step: int) -> Tensor:
        return self._codes(w_ND) * (self.r / 128)

    def encode(self, w_ND: Tensor) -> Tensor:
        return self._codes(w_ND).to(torch.int8)

    def decode(self, code_ND: Tensor) -> Tensor:
        return code_ND.to(torch.float32) * (self.r / 128)

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

    kind = "one_bit"
    params = ("step_size", "init_scale", "max_scale", "amplitude")

    step_size: Steps = 200
    init_scale: Positive = 1.0
    max_scale: float = 10000.0
    amplitude: Positive = 0.1

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check(self, "max_scale", self.max_scale, at_least(self.init_scale))

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
