"""Monolith's `distribution_ops` under the names of its arguments: `shoal.ops` computes.

What torch has no use for is taken and ignored: `name`, `parallel_flag`, `variant_type`. Lengths may
be numbers, tensors of one number, or lists of one. Differences that stay are in docs/names.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal import ops
from shoal.embedding import combiners
from shoal.errors import DTypeError, InputError, no_package
from shoal.ops import (
    finalize_shared_tensor,
    fused_gather_embeddings_by_input,
    gather_embeddings_by_ids_gradient_back_prop,
    gather_embeddings_by_input,
    map_id_to_embedding,
    map_id_to_embedding_gradient_back_prop,
    unique_key_with_value_and_offset,
)
from shoal.ops.ids_by_shard import ValueOffset
from shoal.placement import floormod
from shoal.ragged import Ragged

__all__ = [
    "FirstN",
    "feature_configs",
    "fill_with_offset_map",
    "fill_with_offset_map_gradient",
    "finalize_shared_tensor",
    "fused_embedding_to_layout",
    "fused_embedding_to_layout_grad",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
    "fused_reduce_and_split_gpu",
    "fused_reduce_sum_and_split",
    "fused_reorder_by_indices",
    "fused_sorted_segment_sum",
    "gather_embeddings_by_ids_gradient_back_prop",
    "gather_embeddings_by_input",
    "map_id_to_embedding",
    "map_id_to_embedding_gradient_back_prop",
    "normalize_merged_split",
    "ragged_split_by_indices",
    "reduce_mean",
    "reduce_sqrtn",
    "reduce_sum",
    "reorder_by_indices",
    "split_by_indices",
    "unique_key_with_value_and_offset",
]

Length = int | Tensor | Sequence[int]
_BITS = {torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def split_by_indices(indices: Tensor, tensor: Tensor, num_splits: int) -> list[Tensor]:
    """As `shoal.ops.split_by_indices`."""
    return ops.split_by_indices(indices, tensor, num_splits)


def ragged_split_by_indices(
    indices: Tensor, num: Ragged, num_splits: int
) -> tuple[list[Ragged], list[Ragged]]:
    """As `shoal.ops.ragged_split_by_indices`."""
    values, positions = ops.ragged_split_by_indices(indices, num, num_splits)
    return list(values), list(positions)


def fill_with_offset_map(
    pos: Ragged,
    value: Tensor,
    value_offset_map: ValueOffset,
    value_buffer: Tensor,
    dims: Sequence[int],
) -> Tensor:
    """As `shoal.ops.fill_with_offset_map`."""
    return ops.fill_with_offset_map(pos, value, value_offset_map, value_buffer, dims)


def fill_with_offset_map_gradient(
    pos: Ragged, grad: Tensor, value_offset_map: ValueOffset, dims: Sequence[int]
) -> Tensor:
    """The gradient of the value that `fill_with_offset_map` was given, from the buffer's [E].

    Raises: as `shoal.ops.fill_with_offset_map`.
    """
    rows = pos.lengths.tolist()
    if len(rows) != len(dims):
        raise InputError("dims", list(dims), f"{len(rows)} widths", "Give one per table of pos.")
    size = sum(count * dim for count, dim in zip(rows, dims, strict=True))
    with torch.enable_grad():
        value = grad.new_zeros(size).requires_grad_()
        buffer = torch.zeros_like(grad, requires_grad=False)
        filled = ops.fill_with_offset_map(pos, value, value_offset_map, buffer, dims)
        (found,) = torch.autograd.grad(filled, value, grad)
    return found


def reorder_by_indices(
    input: Tensor, shard_ids: Tensor, num_of_shards: int
) -> tuple[Tensor, Tensor]:
    """As `shoal.ops.reorder_by_indices`, of int64 [N], or of rows [N, C] of int64 or floats.

    Rows of floats are equal where their bits are. Sizes are int32.

    Raises:
        DTypeError: of bfloat16, say.
    """
    bits = _BITS.get(input.dtype)
    if input.is_floating_point() and bits is None:
        allowed = "int64, float16, float32 or float64"
        raise DTypeError("input of reorder_by_indices", input.dtype, allowed, "Convert it.")
    ids = input if bits is None else input.contiguous().view(bits).long()
    found, sizes_W = ops.reorder_by_indices(ids, shard_ids, num_of_shards)
    return found if bits is None else found.to(bits).view(input.dtype), sizes_W.int()


def fused_reorder_by_indices(
    inputs: Sequence[Tensor],
    num_of_shards: int,
    dim_sizes: Sequence[int] | None = None,
    rank0_empty_shard: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `shoal.ops.fused_reorder_by_indices`, without occurrences.

    Args:
        inputs, num_of_shards, dim_sizes: as there.
        rank0_empty_shard: shard 0 has no ids. Monolith reads a variable, and the number of shards.

    Returns:
        (ids, shard_sizes, sharded_slot_sizes, emb_offset_sz, fused_embedding_offsets); sizes are
        int32, offsets int64.

    Raises:
        InputError: rank0_empty_shard without another shard.
    """
    if rank0_empty_shard and num_of_shards == 1:
        remedy = "Leave rank0_empty_shard out, or add shards."
        raise InputError("num_of_shards with rank0_empty_shard", 1, "2 or more", remedy)

    def but_the_first(ids_N: Tensor, shards: int) -> Tensor:
        return floormod(ids_N, shards - 1) + 1

    rule = but_the_first if rank0_empty_shard else floormod
    found = ops.fused_reorder_by_indices(inputs, num_of_shards, dim_sizes, shard_by=rule)
    sizes = (found.shard_sizes_W, found.slot_sizes_WK, found.offset_sizes_K)
    shard_sizes, slot_sizes, offset_sizes = (size.int() for size in sizes)
    return found.ids_U, shard_sizes, slot_sizes, offset_sizes, found.offsets_N


def fused_gather_embeddings_by_input_gradient(
    fused_embeddings: Tensor | int,
    grads: Sequence[Tensor],
    embedding_offsets: Sequence[Tensor],
    embedding_dims: Sequence[int],
    scale: float = 1.0,
) -> Tensor:
    """As `shoal.ops.fused_gather_embeddings_by_input_gradient`."""
    return ops.fused_gather_embeddings_by_input_gradient(
        fused_embeddings, grads, embedding_offsets, embedding_dims, scale
    )


def reduce_sum(
    id_indices: Tensor, id_values: Tensor, id_length: Length, name: str | None = None
) -> Tensor:
    """As `shoal.ops.reduce_sum`."""
    return ops.reduce_sum(id_indices, id_values, _number(id_length))


def reduce_mean(
    id_indices: Tensor, id_values: Tensor, id_length: Length, name: str | None = None
) -> Tensor:
    """As `shoal.ops.reduce_mean`."""
    return ops.reduce_mean(id_indices, id_values, _number(id_length))


def reduce_sqrtn(
    id_indices: Tensor, id_values: Tensor, id_length: Length, name: str | None = None
) -> Tensor:
    """As `shoal.ops.reduce_sqrtn`: the L2 norm."""
    return ops.reduce_sqrtn(id_indices, id_values, _number(id_length))


def fused_sorted_segment_sum(
    indices: Sequence[Tensor], values: Sequence[Tensor], shapes: Sequence[Sequence[int] | Tensor]
) -> list[Tensor]:
    """As `shoal.ops.fused_sorted_segment_sum`; indices may be int32."""
    plain = [tuple(map(int, shape)) for shape in shapes]
    return ops.fused_sorted_segment_sum([one.long() for one in indices], values, plain)


def fused_reduce_sum_and_split(
    id_indices: Tensor,
    id_values: Tensor,
    id_length: Length,
    split_dims: Sequence[int],
    name: str | None = None,
) -> list[Tensor]:
    """As `shoal.ops.fused_reduce_sum_and_split`."""
    length = _number(id_length)
    return ops.fused_reduce_sum_and_split(id_indices, id_values, length, split_dims)


def fused_reduce_and_split_gpu(
    splits: Sequence[Tensor],
    embeddings: Sequence[Tensor],
    slice_dims: Sequence[Sequence[int]],
    name: str | None = None,
) -> list[Tensor]:
    """As `shoal.ops.fused_reduce_and_split_gpu`; splits may be int32, and on the CPU."""
    there = [one.to(rows.device, torch.int64) for one, rows in zip(splits, embeddings, strict=True)]
    return ops.fused_reduce_and_split_gpu(there, embeddings, slice_dims)


def normalize_merged_split(row_split: Tensor, size: Tensor) -> Tensor:
    """As `shoal.ops.normalize_merged_split`; both may be int32."""
    return ops.normalize_merged_split(row_split.long(), size.long())


def fused_embedding_to_layout(
    embeddings_list: Sequence[Tensor],
    fid_list_row_split: Sequence[Tensor] | None,
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch_size: Length,
    variant_type: str,
    feature_cfgs: Any,
    ps_num: int,
    fid_list_emb_row_lenth: Tensor | None = None,
    parallel_flag: int = 0,
    version: Any = 3,
) -> list[Tensor]:
    """As `shoal.ops.fused_embedding_to_layout`; feature_cfgs as of `feature_configs`."""
    offsets = ops.MonolithOffsets(
        fid_offset,
        feature_offset,
        nfl_offset,
        batch_size,
        ps_num,
        version,
        fid_list_row_split,
        fid_list_emb_row_lenth,
    )
    return ops.fused_embedding_to_layout(embeddings_list, offsets, feature_configs(feature_cfgs))


def fused_embedding_to_layout_grad(
    nfl_offset: Tensor,
    feature_offset: Tensor,
    fid_offset: Tensor,
    batch_size: Length,
    embeddings_list: Sequence[Tensor],
    fid_list_row_split: Sequence[Tensor] | None,
    layout_tensors_grad: Sequence[Tensor | None],
    variant_type: str,
    feature_cfgs: Any,
    ps_num: int,
    fid_list_emb_row_lenth: Tensor | None = None,
    layout_tensors_grad_scale: float | Tensor | None = None,
    parallel_flag: int = 0,
    version: Any = 3,
) -> list[Tensor]:
    """As `shoal.ops.fused_embedding_to_layout_grad`; feature_cfgs as of `feature_configs`."""
    offsets = ops.MonolithOffsets(
        fid_offset,
        feature_offset,
        nfl_offset,
        batch_size,
        ps_num,
        version,
        fid_list_row_split,
        fid_list_emb_row_lenth,
    )
    return ops.fused_embedding_to_layout_grad(
        layout_tensors_grad,
        embeddings_list,
        offsets,
        feature_configs(feature_cfgs),
        layout_tensors_grad_scale=layout_tensors_grad_scale,
    )


def FirstN(seq_length: int) -> combiners.FirstN:  # noqa: N802 - Monolith's name
    """`shoal.embedding.combiners.FirstN` by Monolith's argument; its rows may be lists."""
    return combiners.FirstN(seq_length)


def feature_configs(value: Any) -> ops.FeatureConfigs:
    """Features and layouts of Monolith's `FeatureConfigs`: its bytes, or a message.

    Raises:
        InputError: neither, or bytes of something else.
        ConfigError, UnknownName: features and layouts that do not fit together.
    """
    if isinstance(value, ops.FeatureConfigs):
        return value
    try:
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise no_package("FeatureConfigs of Monolith", str(error.name), "serve") from error
    serialize = getattr(value, "SerializeToString", None)
    if not isinstance(value, bytes) and serialize is None:
        allowed = "bytes, or a message with SerializeToString"
        raise InputError("FeatureConfigs", type(value).__name__, allowed, "Give one of these.")
    data = value if serialize is None else serialize()
    try:
        message = _message().FromString(data)
    except DecodeError as error:
        what = "serialized FeatureConfigs"
        raise InputError(what, str(error), "a message of Monolith's", "Check it.") from error
    features = {
        one.key: ops.FeatureConfig(
            one.value.table,
            tuple(one.value.slice_dims),
            _named(_POOLINGS, one.value.pooling_type, "pooling_type"),
            one.value.max_sequence_length,
        )
        for one in message.feature_configs
    }
    layouts = {
        one.key: ops.OutConfig(
            tuple(
                ops.SliceConfig(part.feature_name, part.start, part.end)
                for part in one.value.slice_configs
            ),
            _named(_OUT_TYPES, one.value.out_type, "out_type"),
        )
        for one in message.out_configs
    }
    return ops.FeatureConfigs(features, layouts)


_POOLINGS = {0: "sum", 1: "mean", 3: "firstn"}
_OUT_TYPES = {0: "concat", 1: "stack", 2: "addn", 3: "none"}
# Messages as far as they are read: (field, number, type), in lists with a star. A map travels as a
# list of pairs.
_FIELDS = {
    "Slice": (("feature_name", 1, "string"), ("start", 2, "int32"), ("end", 3, "int32")),
    "Out": (("slice_configs", 1, "Slice*"), ("out_type", 2, "int32")),
    "Feature": (
        ("table", 1, "string"),
        ("pooling_type", 2, "int32"),
        ("slice_dims", 3, "int32*"),
        ("max_sequence_length", 4, "int32"),
    ),
    "FeaturePair": (("key", 1, "string"), ("value", 2, "Feature")),
    "OutPair": (("key", 1, "string"), ("value", 2, "Out")),
    "Configs": (("feature_configs", 1, "FeaturePair*"), ("out_configs", 2, "OutPair*")),
}


@cache
def _message() -> Any:
    """The class of the whole message."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="shoal/monolith_feature_configs.proto", package="shoal.monolith", syntax="proto3"
    )
    for name, own in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind in own:
            plain = kind.rstrip("*")
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            if plain in _FIELDS:
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".shoal.monolith.{plain}"
            else:
                made.type = kinds.Type.Value(f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shoal.monolith.Configs"))


def _named(names: dict[int, str], number: int, what: str) -> Any:
    if number not in names:
        raise InputError(f"{what} of FeatureConfigs", number, names, "Use one of these.")
    return names[number]


def _number(length: Length) -> int | Sequence[int]:
    return length.reshape(-1).tolist() if isinstance(length, Tensor) else length
