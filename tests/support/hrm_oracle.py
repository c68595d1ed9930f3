"""HRM's sparse step and its forward pass, written out plainly; what the example is held against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["PlainForward", "sparse_step"]

Array = np.ndarray[Any, Any]


def sparse_step(
    weights_ND: Tensor,
    ids_of_ranks: Sequence[Tensor],
    grads_of_ranks: Sequence[Tensor],
    lr: float,
    weight_decay: float,
) -> Tensor:
    """Gather ids and gradients of all ranks, sum per id, take the sign, decay touched rows."""
    ids = torch.cat(list(ids_of_ranks))
    grads = torch.cat(list(grads_of_ranks))
    after = weights_ND.clone()
    for row in sorted(set(ids.tolist())):
        total = torch.zeros_like(after[row])
        for at in range(len(ids)):
            if int(ids[at]) == row:
                total += grads[at]
        after[row] = after[row] * (1 - lr * weight_decay) - lr * torch.sign(total)
    return after


class PlainForward:
    """One inner forward of HRM or TRM in float64, one example at a time, from a state dict."""

    def __init__(self, state: Mapping[str, Tensor], config: Any) -> None:
        self.weights = {name: value.double().numpy() for name, value in state.items()}
        self.config = config

    def __call__(self, z_H: Array, z_L: Array, inputs: Array, row: Array) -> dict[str, Array]:
        """States [T, D], tokens [S] and the puzzle's row; gives states, logits and values."""
        c = self.config
        told = self.told(inputs, row)
        for _ in range(c.H_cycles):
            for _ in range(c.L_cycles):
                z_L = self.reason("L_level", z_L, z_H + told)
            z_H = self.reason("L_level" if c.shared_network else "H_level", z_H, z_L)
        q = self.weights["q_head.weight"] @ z_H[0] + self.weights["q_head.bias"]
        logits = z_H[c.prefix :] @ self.weights["lm_head.weight"].T
        return {"z_H": z_H, "z_L": z_L, "logits": logits, "q": q}

    def told(self, inputs: Array, row: Array) -> Array:
        """Prefix of the row, then tokens; positions if learned; scaled."""
        c = self.config
        prefix = np.zeros(c.prefix * c.hidden_size)
        prefix[: len(row)] = row
        tokens = [self.weights["embed_tokens.weight"][token] for token in inputs]
        x = np.array([*prefix.reshape(c.prefix, c.hidden_size), *tokens])
        if c.positions == "learned":
            x = (x + self.weights["embed_pos.weight"]) / math.sqrt(2)
        return x * math.sqrt(c.hidden_size)

    def reason(self, module: str, state: Array, told: Array) -> Array:
        """A recurrent module's call."""
        x, layer = state + told, 0
        while (name := f"{module}.layers.{layer}") + ".mlp.down_proj.weight" in self.weights:
            x = self.norm(x + self.attend(x, name + ".self_attn"))
            x = self.norm(x + self.gated(x, name + ".mlp"))
            layer += 1
        return x

    def norm(self, x: Array) -> Array:
        """Each row over its root mean square."""
        return np.array([v / math.sqrt((v * v).mean() + self.config.norm_eps) for v in x])

    def gated(self, x: Array, name: str) -> Array:
        """SwiGLU."""
        wide = x @ self.weights[name + ".gate_up_proj.weight"].T
        gate, up = wide[:, : wide.shape[1] // 2], wide[:, wide.shape[1] // 2 :]
        return (gate / (1 + np.exp(-gate)) * up) @ self.weights[name + ".down_proj.weight"].T

    def attend(self, x: Array, name: str) -> Array:
        """Attention, one head and one position at a time."""
        heads, d = self.config.num_heads, self.config.hidden_size
        k = d // heads
        q, key, value = np.split(x @ self.weights[name + ".qkv_proj.weight"].T, 3, axis=1)
        out = np.zeros_like(x)
        for head in range(heads):
            part = slice(head * k, head * k + k)
            qs = [self.turn(v, at) for at, v in enumerate(q[:, part])]
            ks = [self.turn(v, at) for at, v in enumerate(key[:, part])]
            for at, query in enumerate(qs):
                scores = np.array([query @ other / math.sqrt(k) for other in ks])
                scores = np.exp(scores - scores.max())
                out[at, part] = (scores / scores.sum()) @ value[:, part]
        return out @ self.weights[name + ".o_proj.weight"].T

    def turn(self, vector: Array, position: int) -> Array:
        """Pairs (i, i + K/2) as complex numbers, each turned by its angle; rotary only."""
        if self.config.positions != "rope":
            return vector
        half = len(vector) // 2
        turned = np.zeros_like(vector)
        for i in range(half):
            angle = position / self.config.rope_theta ** (2 * i / len(vector))
            number = complex(vector[i], vector[i + half]) * complex(
                math.cos(angle), math.sin(angle)
            )
            turned[i], turned[i + half] = number.real, number.imag
        return turned
