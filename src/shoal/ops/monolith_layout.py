"""Monolith's packed encodings of `fused_embedding_to_layout`, decoded to a `LayoutIndex`.

Five encodings exist; all pack the same three levels of offsets. Features are in sorted name order
and cells in (feature, example) order.

`fid_offset`, uint64, one per id, in cell order:

| bits | v1 | v2 | v3, v4, v5 |
|---|---|---|---|
| 63..32 | buffer table*P + ps | segment, see below | buffer table*P + ps |
| 31..0 | row in the buffer | row in the segment | float in the buffer (or the request's part) |

with tables in sorted order, `ps` the parameter server and P their number. In v1 a buffer is
[rows, D]: all features of a table are equally wide. A v2 segment holds one feature's rows in one
buffer; segments are numbered by table, then ps, then the feature's rank among its table's sorted
features, and `fid_list_row_split` (one int64 [features of the table + 1] per buffer) counts the
rows of the segments before it. From v3 on the low half counts floats, so that one table may mix
widths without splits.

`feature_offset`, int32: for each cell the place of its first id in `fid_offset`. The end of the
last cell, the number of ids, may follow or be left out.

`nfl_offset`, uint32: for each feature

| bits | meaning |
|---|---|
| 31 | SHARED: one cell serves the whole batch |
| 30..0 | place of the feature's first cell in `feature_offset` |

The number of cells may follow or be left out. A feature with no cells, or with SHARED and an
empty cell, is missing from the batch and reads as zeros.

v4 concatenates all buffers to one tensor, ps-major: part ps*T + table, of T tables, is
`fid_list_emb_row_lenth[ps*T + table]` floats long. (The high half of `fid_offset` stays
table-major.)

v5 joins R requests: `nfl_size`, `feature_size` and `fid_size`, [R] each, say how many entries of
the three vectors belong to each request, `batch_size` [R] how many examples. Offsets count from
the start of their request. Each buffer holds the floats of request 0, then of request 1, ...:
`emb_size[r*M + m]` floats of buffer m of M. Outputs are the requests' examples, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from shoal.address import check_dense
from shoal.errors import DTypeError, InputError, ShapeError, known_name
from shoal.kernels.host_copies import sent
from shoal.ops.layout_plan import FeatureConfigs, LayoutIndex, on_device

Version = Literal[1, 2, 3, 4, 5]

_NEEDED: dict[int, tuple[str, ...]] = {2: ("fid_list_row_split",), 4: ("fid_list_emb_row_lenth",)}
_LOW = 0xFFFFFFFF
_PLACE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class MonolithOffsets:
    """Monolith's offsets as its data pipeline packs them; the module's docstring has the bits.

    Args:
        fid_offset: uint64 [N], or int64 with the same bits.
        feature_offset: int32 or int64 [C] or [C+1].
        nfl_offset: uint32 [F] or [F+1], or int32 with the same bits, or int64.
        batch_size: examples; with several requests (v5) one number each.
        ps_num: parameter servers P.
        version: which encoding.
        fid_list_row_split: v2 only, one int64 [features of the table + 1] per buffer.
        fid_list_emb_row_lenth: v4 only, int32 or int64 [P*T].
        nfl_size, feature_size, fid_size: v5 with several requests, [R].
        emb_size: v5 with several requests, [R*M].

    Raises:
        DTypeError: other dtypes.
        ShapeError: not one-dimensional.
        InputError: an argument the version needs is missing, or ps_num is below 1.
    """

    fid_offset: Tensor
    feature_offset: Tensor
    nfl_offset: Tensor
    batch_size: int | Sequence[int] | Tensor
    ps_num: int
    version: Version = 3
    fid_list_row_split: Sequence[Tensor] | None = None
    fid_list_emb_row_lenth: Tensor | None = None
    nfl_size: Tensor | None = None
    feature_size: Tensor | None = None
    fid_size: Tensor | None = None
    emb_size: Tensor | None = None

    def __post_init__(self) -> None:
        known_name("version", self.version, get_args(Version))
        if self.ps_num < 1:
            raise _bad(InputError, "ps_num", self.ps_num, "1 or more", "One without servers.")
        allowed = {
            "fid_offset": (torch.uint64, torch.int64),
            "feature_offset": (torch.int32, torch.int64),
            "nfl_offset": (torch.uint32, torch.int32, torch.int64),
        }
        for name, dtypes in allowed.items():
            tensor: Tensor = getattr(self, name)
            check_dense(name, tensor)
            if tensor.dtype not in dtypes:
                raise _bad(DTypeError, f"dtype of {name}", tensor.dtype, dtypes, "Convert it.")
            if tensor.ndim != 1:
                got = tuple(tensor.shape)
                raise _bad(ShapeError, f"shape of {name}", got, "one dimension", "Flatten it.")
        needed = _NEEDED.get(self.version, ())
        if len(self.batch_sizes) > 1:
            if self.version != 5:
                what = f"batch_size of version {self.version}"
                raise _bad(InputError, what, self.batch_sizes, "one number", "Use version 5.")
            needed = ("nfl_size", "feature_size", "fid_size", "emb_size")
        for name in needed:
            if getattr(self, name) is None:
                what = f"{name} of version {self.version}"
                raise _bad(InputError, what, None, "a tensor", "The data pipeline makes it.")

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Examples of each request; reads `batch_size` if it is a tensor."""
        if isinstance(self.batch_size, int):
            return (self.batch_size,)
        if isinstance(self.batch_size, Tensor):
            check_dense("batch_size", self.batch_size)
            return tuple(self.batch_size.reshape(-1).tolist())
        return tuple(self.batch_size)


def decode_monolith(
    offsets: MonolithOffsets, embeddings_list: Sequence[Tensor], configs: FeatureConfigs
) -> LayoutIndex:
    """The `LayoutIndex` of packed offsets; buffers stay as they are.

    Reads no values on the host, but for `batch_size` given as a tensor and for several requests
    (v5), which are for serving on the CPU. A buffer number out of range stays one and is refused
    by the layout operation, not here.

    Raises:
        ShapeError: the number of buffers, splits or features does not fit the configs.
        InputError: v1 buffers that are not [rows, D].
    """
    _check_buffers(offsets, embeddings_list, configs)
    packed_N = offsets.fid_offset.view(torch.int64)
    high_N, low_N = (packed_N >> 32) & _LOW, packed_N & _LOW
    requests = _requests(offsets)
    if offsets.version in (3, 5) and len(requests) == 1:
        # Beyond int32 it wraps to a negative number, which is out of range just as well.
        rows_N, buffer_N = low_N, high_N.to(torch.int32)
    else:
        rows_N, buffer_N = _looked_up(offsets, embeddings_list, configs, high_N, low_N)
    cells, splits, cell_base, fid_base = [], [], 0, 0
    for nfl_offset, feature_offset, size, fids in requests:
        features = len(configs.features)
        cells.append(_cells(nfl_offset, feature_offset, size, fids, features, cell_base))
        splits.append(feature_offset.to(torch.int64) + fid_base)
        cell_base, fid_base = cell_base + feature_offset.shape[0], fid_base + fids
    splits.append(packed_N.new_full((1,), packed_N.shape[0]))
    return LayoutIndex(rows_N, buffer_N, torch.cat(splits), torch.stack(cells), offsets.batch_sizes)


def _requests(offsets: MonolithOffsets) -> list[tuple[Tensor, Tensor, int, int]]:
    """nfl_offset, feature_offset, examples and ids of each request."""
    sizes = offsets.batch_sizes
    if len(sizes) == 1:
        fids = offsets.fid_offset.shape[0]
        return [(offsets.nfl_offset, offsets.feature_offset, sizes[0], fids)]
    vectors = {
        "nfl_size": offsets.nfl_offset,
        "feature_size": offsets.feature_offset,
        "fid_size": offsets.fid_offset,
    }
    parts: list[list[int]] = []
    for name, vector in vectors.items():
        counts: list[int] = getattr(offsets, name).tolist()
        if len(counts) != len(sizes) or sum(counts) != vector.shape[0] or min(counts) < 0:
            allowed = f"{len(sizes)} sizes that sum to {vector.shape[0]}"
            raise _bad(ShapeError, name, counts, allowed, "Give one size per request.")
        parts.append(counts)
    nfl = torch.split(offsets.nfl_offset, parts[0])
    feature = torch.split(offsets.feature_offset, parts[1])
    return list(zip(nfl, feature, sizes, parts[2], strict=True))


def _cells(
    nfl_offset: Tensor, feature_offset: Tensor, size: int, fids: int, features: int, base: int
) -> Tensor:
    """`LayoutIndex.cells_RF` of one request."""
    entries = nfl_offset.shape[0]
    if entries not in (features, features + 1):
        allowed = f"{features} or {features + 1}, for {features} features"
        raise _bad(ShapeError, "length of nfl_offset", entries, allowed, "One per feature.")
    bits = nfl_offset.view(torch.int32) if nfl_offset.dtype == torch.uint32 else nfl_offset
    bits = bits.to(torch.int64)
    places, shared_F = bits & _PLACE, (bits[:features] >> 31) & 1
    if entries == features:
        places = torch.cat([places, _end(places[-1:], shared_F[-1:], feature_offset, size, fids)])
    first_F, counts_F = places[:-1], places.diff()
    return torch.stack([first_F + base, counts_F, shared_F], dim=1)


def _end(last: Tensor, shared: Tensor, feature_offset: Tensor, size: int, fids: int) -> Tensor:
    """Where the last feature's cells end, when nfl_offset does not say.

    The number of ids at the end of feature_offset looks like one more cell, or like the only cell
    of a feature that is missing.
    """
    entries = feature_offset.shape[0]
    wanted = torch.where(shared == 1, 1, size)
    end = (last + wanted).clamp(max=entries)
    if entries == 0:
        return end
    empty = feature_offset[last.clamp(max=entries - 1)] == fids
    return torch.where((end - last < wanted) & empty, last, end)


def _looked_up(
    offsets: MonolithOffsets,
    embeddings_list: Sequence[Tensor],
    configs: FeatureConfigs,
    high_N: Tensor,
    low_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """rows_N and buffer_N through a table with an entry per value of the high half."""
    device = high_N.device
    if offsets.version == 1:
        facts = [[m, 0, buffer.shape[1]] for m, buffer in enumerate(embeddings_list)]
        facts_X3 = on_device(facts, device).view(-1, 3)
    elif offsets.version == 2:
        facts_X3 = sent(_segments(offsets, configs), device)
    elif offsets.version == 4:
        facts_X3 = sent(_parts(offsets, len(configs.tables)), device)
    else:
        facts_X3, high_N = _request_parts(offsets, len(embeddings_list), high_N)
    # One more entry, for halves out of range: a buffer that does not exist.
    nowhere = facts_X3.new_full((1, 3), len(embeddings_list))
    facts_N3 = torch.cat([facts_X3, nowhere])[high_N.clamp(max=facts_X3.shape[0])]
    return facts_N3[:, 1] + low_N * facts_N3[:, 2], facts_N3[:, 0].to(torch.int32)


def _segments(offsets: MonolithOffsets, configs: FeatureConfigs) -> Tensor:
    """v2: buffer, first float and row width of each segment."""
    splits = offsets.fid_list_row_split or ()
    facts = []
    for m, split in enumerate(splits):
        names = configs.features_of(configs.tables[m // offsets.ps_num])
        if tuple(split.shape) != (len(names) + 1,):
            allowed = f"({len(names) + 1},): {len(names)} features and the end"
            what = f"shape of fid_list_row_split[{m}]"
            raise _bad(ShapeError, what, tuple(split.shape), allowed, "One entry per feature.")
        (widths,) = on_device([[configs.feature_configs[n].width for n in names]], split.device)
        floats = (widths * split.diff()).cumsum(0)
        first = torch.cat([floats.new_zeros(1), floats[:-1]])
        facts.append(torch.stack([torch.full_like(first, m), first, widths], dim=1))
    return torch.cat(facts).to(torch.int64)


def _parts(offsets: MonolithOffsets, tables: int) -> Tensor:
    """v4: buffer 0, first float and stride 1 of each table-major part of a ps-major buffer."""
    lengths = offsets.fid_list_emb_row_lenth
    if lengths is None or lengths.numel() != offsets.ps_num * tables:
        got = None if lengths is None else lengths.numel()
        allowed = f"{offsets.ps_num * tables}: ps_num times tables"
        raise _bad(ShapeError, "length of fid_list_emb_row_lenth", got, allowed, "See version 4.")
    floats = lengths.reshape(-1).to(torch.int64)
    first = (floats.cumsum(0) - floats).view(offsets.ps_num, tables).t().reshape(-1)
    return torch.stack([torch.zeros_like(first), first, torch.ones_like(first)], dim=1)


def _request_parts(offsets: MonolithOffsets, buffers: int, high_N: Tensor) -> tuple[Tensor, Tensor]:
    """v5: buffer, first float and stride 1 of each request's part; each id's entry."""
    requests, fid_size, emb_size = len(offsets.batch_sizes), offsets.fid_size, offsets.emb_size
    if fid_size is None or emb_size is None or emb_size.numel() != requests * buffers:
        got = None if emb_size is None else emb_size.numel()
        allowed = f"{requests * buffers}: requests times buffers"
        raise _bad(ShapeError, "length of emb_size", got, allowed, "See version 5.")
    floats_RM = emb_size.reshape(requests, buffers).to(torch.int64)
    first_RM = floats_RM.cumsum(0) - floats_RM
    number_RM = torch.arange(buffers, device=first_RM.device).expand(requests, -1)
    facts = [number_RM, first_RM, torch.ones_like(first_RM)]
    request_N = torch.arange(requests, device=high_N.device).repeat_interleave(
        fid_size.to(high_N.device), output_size=high_N.shape[0]
    )
    entry_N = torch.where(high_N < buffers, request_N * buffers + high_N, requests * buffers)
    return torch.stack(facts, dim=2).view(-1, 3).to(high_N.device), entry_N


def _check_buffers(
    offsets: MonolithOffsets, embeddings_list: Sequence[Tensor], configs: FeatureConfigs
) -> None:
    want = 1 if offsets.version == 4 else len(configs.tables) * offsets.ps_num
    if len(embeddings_list) != want:
        allowed = f"{want} for {len(configs.tables)} tables and {offsets.ps_num} servers"
        what = f"length of embeddings_list of version {offsets.version}"
        raise _bad(ShapeError, what, len(embeddings_list), allowed, "Tables come first.")
    if offsets.version == 2 and len(offsets.fid_list_row_split or ()) != want:
        got = len(offsets.fid_list_row_split or ())
        raise _bad(ShapeError, "length of fid_list_row_split", got, want, "One per buffer.")
    if offsets.version != 1:
        return
    for m, buffer in enumerate(embeddings_list):
        if buffer.ndim != 2:
            what, got_shape = f"shape of embeddings_list[{m}] of version 1", tuple(buffer.shape)
            raise _bad(ShapeError, what, got_shape, "[rows, D]", "Use version 3 for flat buffers.")


def _bad(
    kind: type[InputError], what: str, got: object, allowed: object, remedy: str
) -> InputError:
    return kind(f"MonolithOffsets: {what}", got=got, allowed=allowed, remedy=remedy)
