"""Tensors of the protocols as numpy arrays, and back. Whatever comes in may be malformed."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import DataError
from shoal.serve.protos import openinference_pb2 as oip
from shoal.serve.protos import tfserving_pb2 as tfs
from shoal.serve.signature import Array

MOST_ELEMENTS = 1 << 24  # of a tensor that comes in
_MOST_FILLED = 1 << 16  # of a tensor whose list is shorter than its shape
_MOST_DIMENSIONS = 8


class WireType(NamedTuple):
    """A dtype: TF's number and field of values, the Open Inference name and field, numpy's."""

    tf: int
    tf_field: str
    oip: str
    oip_field: str
    numpy: np.dtype[Any]


_BFLOAT16 = "BF16"
_TYPES = tuple(
    WireType(number, f"{field}_val", name, f"{contents}_contents" if contents else "", dtype)
    for number, field, name, contents, dtype in (
        (tfs.DT_FLOAT, "float", "FP32", "fp32", np.dtype("<f4")),
        (tfs.DT_DOUBLE, "double", "FP64", "fp64", np.dtype("<f8")),
        (tfs.DT_HALF, "half", "FP16", "", np.dtype("<f2")),
        (tfs.DT_BFLOAT16, "half", _BFLOAT16, "", np.dtype("<u2")),
        (tfs.DT_INT64, "int64", "INT64", "int64", np.dtype("<i8")),
        (tfs.DT_INT32, "int", "INT32", "int", np.dtype("<i4")),
        (tfs.DT_INT16, "int", "INT16", "int", np.dtype("<i2")),
        (tfs.DT_INT8, "int", "INT8", "int", np.dtype("i1")),
        (tfs.DT_UINT64, "uint64", "UINT64", "uint64", np.dtype("<u8")),
        (tfs.DT_UINT32, "uint32", "UINT32", "uint", np.dtype("<u4")),
        (tfs.DT_UINT16, "int", "UINT16", "uint", np.dtype("<u2")),
        (tfs.DT_UINT8, "int", "UINT8", "uint", np.dtype("u1")),
        (tfs.DT_BOOL, "bool", "BOOL", "bool", np.dtype("?")),
        (tfs.DT_STRING, "string", "BYTES", "bytes", np.dtype("O")),
    )
)
_BY_TF = {one.tf: one for one in _TYPES}
_BY_OIP = {one.oip: one for one in _TYPES}
_BY_NUMPY: dict[Any, WireType] = {one.numpy: one for one in _TYPES}  # uint16 is no BF16


def wire_type(array_or_dtype: Array | str) -> WireType:
    """The dtype of an array that goes out, or of a name such as "float32"."""
    dtype = np.dtype(array_or_dtype) if isinstance(array_or_dtype, str) else array_or_dtype.dtype
    return _BY_NUMPY[np.dtype("O") if dtype.kind in "SU" else dtype]


def refused(what: str, got: object, allowed: object, remedy: str = "") -> DataError:
    """The error of a tensor that is not what its protocol allows."""
    return DataError(what, got, allowed, remedy or "Encode tensors as the protocol has them.")


def tensor_of_tf(name: str, tensor: tfs.TensorProto) -> Array:
    """A TensorProto's values, of raw content or of typed values.

    Raises:
        DataError: malformed, too large, or of an unknown dtype.
    """
    kind = _BY_TF.get(tensor.dtype)
    if kind is None:
        known = ", ".join(tfs.DataType.Name(number) for number in _BY_TF)
        raise refused(f"dtype of input {name!r}", tensor.dtype, known)
    if tensor.tensor_shape.unknown_rank:
        raise refused(f"shape of input {name!r}", "unknown rank", "sizes")
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    count = _count(name, shape)
    if tensor.tensor_content:
        return _raw(name, kind, tensor.tensor_content, shape, count)
    given = getattr(tensor, kind.tf_field)
    if kind.tf_field == "half_val":
        kind = kind._replace(numpy=np.dtype("<u2"))
    values = _listed(name, kind, given, count)
    if len(values) < count:  # TF leaves out what repeats the last one
        if count > _MOST_FILLED:
            allowed = f"{count}, or a shape of at most {_MOST_FILLED} elements"
            raise refused(f"values of input {name!r}", len(values), allowed)
        fill = values[-1] if len(values) else (b"" if kind.numpy.hasobject else 0)
        values = np.concatenate([values, np.full(count - len(values), fill, values.dtype)])
    if tensor.dtype == tfs.DT_HALF:
        values = values.view("<f2")
    return _widened(kind, values.reshape(shape))


def reply_of_tf(name: str, tensor: tfs.TensorProto) -> Array:
    """A TensorProto of a server that is trusted: raw content of any size is not copied.

    Raises:
        DataError: malformed, or of an unknown dtype.
    """
    kind = _BY_TF.get(tensor.dtype)
    if kind is None or not tensor.tensor_content or kind.numpy.hasobject:
        return tensor_of_tf(name, tensor)
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    return _raw(name, kind, tensor.tensor_content, shape, math.prod(shape))


def tensor_to_tf(array: Array, *, raw: bool = False) -> tfs.TensorProto:
    """An array as a TensorProto: typed values, as TF-Serving replies, or raw content."""
    kind = wire_type(array)
    shape = tfs.TensorShapeProto(dim=[tfs.TensorShapeProto.Dim(size=n) for n in array.shape])
    made = tfs.TensorProto(dtype=kind.tf, tensor_shape=shape)  # type: ignore[arg-type]
    if raw and not kind.numpy.hasobject:
        made.tensor_content = array.tobytes()
    elif kind.tf_field == "half_val":
        made.half_val.extend(array.reshape(-1).view("<u2").tolist())
    else:
        values = array.reshape(-1).tolist()
        texts = kind.numpy.hasobject
        getattr(made, kind.tf_field).extend(map(_as_bytes, values) if texts else values)
    return made


def tensor_of_oip(
    tensor: oip.ModelInferRequest.InferInputTensor, raw: bytes | memoryview | None
) -> Array:
    """An Open Inference input's values, of its raw content or of its `contents`.

    Raises:
        DataError: malformed, too large, or of an unknown datatype.
    """
    kind, shape, count = _declared(tensor.name, tensor.datatype, tensor.shape)
    if raw is not None:
        if tensor.HasField("contents"):
            raise refused(f"contents of input {tensor.name!r}", "raw and typed", "one of them")
        return _raw(tensor.name, kind, raw, shape, count)
    if not kind.oip_field:
        raise refused(f"contents of input {tensor.name!r}", kind.oip, f"{kind.oip} as raw content")
    values = _listed(tensor.name, kind, getattr(tensor.contents, kind.oip_field), count)
    return _complete(tensor.name, values, count).reshape(shape)


def tensor_of_json(name: str, datatype: str, shape: Sequence[Any], data: Any) -> Array:
    """An Open Inference input's values of JSON, flat or nested.

    Raises:
        DataError: malformed, too large, or of an unknown datatype.
    """
    kind, sizes, count = _declared(name, datatype, shape)
    flat: list[Any] = []
    _flatten(name, data, flat, 0)
    if kind.numpy.hasobject:
        flat = [_as_bytes(value) for value in flat]
    values = _listed(name, kind, flat, count)
    return _widened(kind, _complete(name, values, count).reshape(sizes))


def tensor_of_bytes(name: str, datatype: str, shape: Sequence[Any], raw: memoryview) -> Array:
    """An Open Inference input's values of the binary extension.

    Raises:
        DataError: malformed, too large, or of an unknown datatype.
    """
    kind, sizes, count = _declared(name, datatype, shape)
    return _raw(name, kind, raw, sizes, count)


def bytes_of(array: Array) -> bytes:
    """Raw content as the Open Inference protocol has it."""
    if wire_type(array).numpy.hasobject:
        texts = [_as_bytes(value) for value in array.reshape(-1).tolist()]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return array.tobytes()


def array_of_lists(name: str, rows: Any) -> tuple[Array, Array | None]:
    """An array of JSON lists; of ragged ones the values [N], and their lengths [B].

    Raises:
        DataError: not numbers, or not texts, throughout.
    """
    if isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows):
        lengths = [len(row) for row in rows]
        if min(lengths) < max(lengths):
            values = [value for row in rows for value in row]
            if any(isinstance(value, list) for value in values):
                raise refused(f"lists of input {name!r}", "ragged lists of lists", "[B, L] ids")
            return _of_values(name, values), np.array(lengths, dtype=np.int64)
    return _of_values(name, rows), None


def _of_values(name: str, rows: Any) -> Array:
    flat: list[Any] = []
    _flatten(name, rows, flat, 0)
    if len(flat) > MOST_ELEMENTS:
        raise refused(f"elements of input {name!r}", len(flat), MOST_ELEMENTS)
    kinds = {type(value) for value in flat}
    if kinds <= {str, dict}:
        texts = np.empty(len(flat), dtype=object)
        texts[:] = [_as_bytes(value) for value in flat]
        made: Array = texts
    elif kinds <= {int, float, bool}:
        try:
            made = np.array(flat, dtype=np.float64 if float in kinds else np.int64)
        except OverflowError as error:
            raise refused(f"numbers of input {name!r}", error, "64 bits") from None
    else:
        got = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise refused(f"values of input {name!r}", got, "numbers or texts")
    shape: list[int] = []
    level = rows
    while isinstance(level, list):
        shape.append(len(level))
        if not level:
            break
        level = level[0]
    if not _fits(rows, shape):
        raise refused(f"lists of input {name!r}", "different lengths", "one length, or [B, L] ids")
    return made.reshape(shape)


def _fits(rows: Any, shape: Sequence[int]) -> bool:
    if not shape:
        return not isinstance(rows, list)
    inner = shape[1:]
    return (
        isinstance(rows, list) and len(rows) == shape[0] and all(_fits(one, inner) for one in rows)
    )


def _flatten(name: str, data: Any, flat: list[Any], depth: int) -> None:
    if not isinstance(data, list):
        flat.append(data)
        return
    if depth == _MOST_DIMENSIONS:
        raise refused(f"dimensions of input {name!r}", "more", f"at most {_MOST_DIMENSIONS}")
    for item in data:
        if isinstance(item, list):
            _flatten(name, item, flat, depth + 1)
        else:
            flat.append(item)


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict) and isinstance(value.get("b64"), str):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except ValueError:
            pass
    if not isinstance(value, str):
        raise refused("element of a BYTES input", repr(value)[:40], 'a text, or {"b64": "..."}')
    return value.encode("utf-8", "surrogatepass")


def _count(name: str, shape: Sequence[Any]) -> int:
    count = most = 1 if len(shape) <= _MOST_DIMENSIONS else -1
    for n in shape:
        if type(n) is not int or n < 0 or most < 0:  # True is no size
            most = -1
            break
        count *= n
        most *= n or 1  # sizes next to a 0 count too: what is made for [0, n] must not take n
    if not 0 <= most <= MOST_ELEMENTS:
        allowed = f"{_MOST_DIMENSIONS} sizes of 0 or more, {MOST_ELEMENTS} elements"
        raise refused(f"shape of input {name!r}", str(list(shape))[:80], f"at most {allowed}")
    return count


def _declared(
    name: str, datatype: str, shape: Iterable[Any]
) -> tuple[WireType, tuple[int, ...], int]:
    kind = _BY_OIP.get(datatype) if isinstance(datatype, str) else None
    if kind is None:
        raise refused(f"datatype of input {name!r}", repr(datatype)[:40], ", ".join(_BY_OIP))
    sizes = tuple(shape)
    return kind, sizes, _count(name, sizes)


def _raw(
    name: str, kind: WireType, raw: bytes | memoryview, shape: Sequence[int], count: int
) -> Array:
    if kind.numpy.hasobject:
        return _texts(name, raw, count).reshape(shape)
    wanted = count * kind.numpy.itemsize
    if len(raw) != wanted:
        raise refused(f"raw content of input {name!r}", f"{len(raw)} bytes", f"{wanted} bytes")
    return _widened(kind, np.frombuffer(raw, dtype=kind.numpy).reshape(shape))


def _texts(name: str, raw: bytes | memoryview, count: int) -> Array:
    if 4 * count > len(raw):
        raise refused(f"raw content of input {name!r}", f"{len(raw)} bytes", f"{count} texts")
    made, at = np.empty(count, dtype=object), 0
    for k in range(count):
        size = struct.unpack_from("<I", raw, at)[0] if at + 4 <= len(raw) else len(raw)
        at += 4 + size
        if at > len(raw):
            break
        made[k] = bytes(raw[at - size : at])
    if at != len(raw):
        raise refused(f"raw content of input {name!r}", "other lengths", f"{count} texts")
    return made


def _listed(name: str, kind: WireType, given: Sequence[Any], count: int) -> Array:
    if len(given) > count:
        raise refused(f"values of input {name!r}", len(given), f"at most {count}, by its shape")
    if kind.numpy.hasobject:
        texts = np.empty(len(given), dtype=object)
        texts[:] = list(given)
        return texts
    try:
        whole = kind.numpy.kind in "iu"
        if whole and any(isinstance(one, float | str | bool) for one in given):
            raise ValueError("no whole numbers")
        if kind.numpy.kind == "b" and not all(isinstance(one, bool) for one in given):
            raise ValueError("no booleans")
        if kind.numpy.kind == "f" and any(isinstance(one, str) for one in given):
            raise ValueError("no numbers")
        return np.array(given, dtype=kind.numpy)
    except (TypeError, ValueError, OverflowError) as error:
        raise refused(f"values of input {name!r}", str(error)[:80], kind.oip) from None


def _complete(name: str, values: Array, count: int) -> Array:
    if len(values) != count:
        raise refused(f"values of input {name!r}", len(values), f"{count}, by its shape")
    return values


def _widened(kind: WireType, array: Array) -> Array:
    """BF16 as float32, which numpy knows."""
    if kind.oip != _BFLOAT16:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)
