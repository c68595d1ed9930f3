"""Blocks of the reasoning modules: post-norm, no biases, weights cast at use.

Parameters are float32 masters; each is cast to the dtype of its input. Shapes: B examples,
S positions, D width, H heads, K width of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from hrm.model_config import ModelConfig

__all__ = [
    "Attention",
    "Block",
    "CastedEmbedding",
    "CastedLinear",
    "PositionMixer",
    "Reasoner",
    "Rotary",
    "SwiGLU",
    "gated_width",
    "rms_norm",
    "rotate",
    "truncated_normal",
]

# A standard normal truncated at two deviations has a smaller deviation, computed below.
_CUT = 2.0


def _cut_deviation() -> float:
    density = math.exp(-_CUT * _CUT / 2) / math.sqrt(2 * math.pi)
    mass = math.erf(_CUT / math.sqrt(2))
    return math.sqrt(1 - 2 * _CUT * density / mass)


def truncated_normal(
    shape: tuple[int, ...], std: float, generator: torch.Generator | None = None
) -> Tensor:
    """Normal values truncated at two deviations, scaled so that their deviation is `std`."""
    values = torch.empty(shape)
    if std == 0:
        return values.zero_()
    nn.init.trunc_normal_(values, 0.0, 1.0, -_CUT, _CUT, generator=generator)
    return values.mul_(std / _cut_deviation())


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square along the last dim, without gain; worked out in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def gated_width(hidden: int, expansion: float, multiple: int = 256) -> int:
    """Width of the gated layer: two thirds of the expansion, up to a multiple."""
    wanted = round(expansion * hidden * 2 / 3)
    return -(-wanted // multiple) * multiple


class CastedLinear(nn.Module):
    """A linear map of float32 weights, cast to its input's dtype."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        std = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(truncated_normal((outputs, inputs), std, generator))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)


class CastedEmbedding(nn.Module):
    """A static table of float32 rows, read in the forward dtype."""

    def __init__(
        self, rows: int, dim: int, dtype: torch.dtype, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(truncated_normal((rows, dim), 1 / math.sqrt(dim), generator))
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight.to(self.dtype))


class Rotary(nn.Module):
    """Cosines and sines of rotary positions, [S, K]; not saved, they follow from sizes."""

    cos_SK: Tensor
    sin_SK: Tensor

    def __init__(self, head_dim: int, length: int, theta: float, dtype: torch.dtype) -> None:
        super().__init__()
        powers = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float64), theta**-powers)
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cos_SK", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin_SK", angles.sin().to(dtype), persistent=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.cos_SK, self.sin_SK


def rotate(x_BHSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """Turn the pairs (k, k + K/2) by their position's angle; worked out in float32."""
    wide = x_BHSK if x_BHSK.dtype == torch.float64 else x_BHSK.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (wide * cos_SK + turned * sin_SK).to(x_BHSK.dtype)


class Attention(nn.Module):
    """Every position sees every other."""

    def __init__(self, hidden: int, heads: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = CastedLinear(hidden, 3 * hidden, generator=generator)
        self.o_proj = CastedLinear(hidden, hidden, generator=generator)

    def forward(self, x_BSD: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        b, s, d = x_BSD.shape
        heads = self.qkv_proj(x_BSD).view(b, s, 3 * self.heads, d // self.heads).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(b, s, d))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, hidden: int, width: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.gate_up_proj = CastedLinear(hidden, 2 * width, generator=generator)
        self.down_proj = CastedLinear(width, hidden, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)  # type: ignore[no-any-return]


class PositionMixer(nn.Module):
    """A gated layer over positions instead of attention, normed over positions, too."""

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        length = config.total_len
        width = gated_width(length, config.expansion, config.gated_multiple)
        self.mlp = SwiGLU(length, width, generator)
        self.eps = config.norm_eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BDS = x_BSD.transpose(1, 2)
        return rms_norm(x_BDS + self.mlp(x_BDS), self.eps).transpose(1, 2)


class Block(nn.Module):
    """Mix positions, then widths; the norm comes after each residual sum."""

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.eps = config.norm_eps
        hidden = config.hidden_size
        self.self_attn: Attention | None = None
        self.mixer: PositionMixer | None = None
        if config.mixer == "attention":
            self.self_attn = Attention(hidden, config.num_heads, generator)
        else:
            self.mixer = PositionMixer(config, generator)
        width = gated_width(hidden, config.expansion, config.gated_multiple)
        self.mlp = SwiGLU(hidden, width, generator)

    def forward(self, x_BSD: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        if self.self_attn is not None:
            x_BSD = rms_norm(x_BSD + self.self_attn(x_BSD, angles), self.eps)
        elif self.mixer is not None:
            x_BSD = self.mixer(x_BSD)
        return rms_norm(x_BSD + self.mlp(x_BSD), self.eps)


class Reasoner(nn.Module):
    """A recurrent module: adds its input to its state, then applies some blocks."""

    def __init__(
        self, config: ModelConfig, layers: int, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(config, generator) for _ in range(layers)])

    def forward(
        self, state_BSD: Tensor, told_BSD: Tensor, angles: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        state_BSD = state_BSD + told_BSD
        for layer in self.layers:
            state_BSD = layer(state_BSD, angles)
        return state_BSD
