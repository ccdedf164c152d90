"""The stored tensors that together are one quantised weight, found by their names. Imports no torch.

    fp8                  X.weight         X.weight_scale_inv or X.weight_scale                   codes are (out, in)
    compressed-tensors   X.weight         X.weight_scale, X.weight_zero_point                    (out, in)
                         X.weight_packed  the same, X.weight_shape, X.weight_g_idx               (out, in / words)
    gptq                 X.qweight        X.scales, X.qzeros, X.g_idx                            (in / words, out)
    awq                  X.qweight        X.scales, X.qzeros                                     (in, out / words)
    mxfp4                X_blocks         X_scales                             (experts, out, in / 32, 16 bytes)

Which weights are quantised follows from the names that are there, not from the exceptions listed in config.json. Every
scale must belong to a weight, and every weight of codes must have its scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sarathi_pp.checkpoint.files import TensorEntry
from sarathi_pp.checkpoint.quantised.scheme import Scheme, WeightRule
from sarathi_pp.errors import InputError, UnsupportedModelError

Layout = Literal["plain", "turned", "packed", "gptq", "awq", "mxfp4"]

FLOAT8 = ("F8_E4M3", "F8_E5M2")
_WORD_BITS = 32
# Remedies for parts that do not fit together, and for forms that are not read.
_AGAIN = "\n  try  download config.json and the weights again"
_OTHER = "\n  try  another checkpoint of this model, quantised in another form or unquantised"
# Values of mxfp4 that share a scale, and bytes that hold them.
_MX_GROUP, _MX_BYTES = 32, 16
# Endings of more tensors of a quantised module, after its name. They are for engines that quantise activations.
_OF_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "output_zero_point",
)
# Endings of tensors that have no use without codes.
_PARTS = (
    "_scale_inv",
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    ".qzeros",
    ".scales",
    ".g_idx",
    "_scales",
    *_OF_ACTIVATIONS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedEntry:
    """The position of one quantised weight: its codes, and what makes floats of them.

    value = (code - zero) * scale, where a block of values shares zero and scale.

    Attributes:
        name: of the tensor with the codes, for messages.
        layout: how the codes are placed in their tensor.
        shape: of the weight as floats.
        bits: bits of a code.
        scales: one scale per block of values.
        zeros: one integer per block of values, which is subtracted from the codes; None for 0.
        symmetric_zeros: zero points of symmetric codes, which must all be 0; None if they are not stored.
        order: index of the group of every input; None if the groups follow each other.
        stated: the weight's shape, which must agree with `shape`; None if it is not stored.
        float32_product: the product is computed in float32. Otherwise it is computed in the type of the scales.
        block: rows and columns of the weight that share a scale.
    """

    name: str
    layout: Layout
    shape: tuple[int, ...]
    bits: int
    codes: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None = None
    symmetric_zeros: TensorEntry | None = None
    order: TensorEntry | None = None
    stated: TensorEntry | None = None
    block: tuple[int, int]
    float32_product: bool = False

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """All stored tensors of the weight."""
        found = (self.codes, self.scales, self.zeros, self.symmetric_zeros, self.order, self.stated)
        return tuple(part for part in found if part is not None)


Entry = TensorEntry | QuantisedEntry


def join_parts(
    tensors: Mapping[str, TensorEntry], scheme: Scheme, aliases: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, Entry]:
    """Return the weights of a quantised checkpoint by the names that unquantised ones would have.

    Tensors that are not quantised stay as they are. Scales of activations are left out.

    Args:
        aliases: other names of tensors, by which config.json may name their modules; None if they have no others.

    Raises:
        InputError: a part is missing, is left over or has the wrong shape.
        UnsupportedModelError: a weight is stored in a form that is not read.
    """
    join = _JOINS[scheme.method]
    joined: dict[str, Entry] = {}
    used: set[str] = set()
    for key in tensors:
        group = _Group(tensors, key, scheme, (aliases or {}).get(key, (key,)))
        for name, entry in join(group):
            if name in tensors and name != key:
                raise InputError(
                    f"{tensors[key].file}: {key} and {name} are the same weight, stored twice; expected one of them"
                    f"{_AGAIN}"
                )
            joined[name] = entry
            used.update(group.taken)
    for key, tensor in tensors.items():
        if key in used or key in joined:
            continue
        if key.endswith(_PARTS):
            raise InputError(
                f"{tensor.file}: {key} belongs to no quantised weight; expected its codes next to it. The file or the "
                f"index is incomplete, or config.json is of another model{_AGAIN}"
            )
        joined[key] = tensor
    return joined


class _Group:
    """The parts of the weight whose codes may be the tensor `key`.

    Attributes:
        published: names of the codes by which config.json may name their module.
        taken: names of the tensors that have been asked for and are there.
    """

    def __init__(
        self, tensors: Mapping[str, TensorEntry], key: str, scheme: Scheme, published: tuple[str, ...]
    ) -> None:
        self.key = key
        self.codes = tensors[key]
        self.scheme = scheme
        self.published = published
        self._tensors = tensors
        self.taken = [key]

    def find(self, *names: str) -> TensorEntry | None:
        """Return the first of these tensors that is there; None if there is none."""
        for name in names:
            if name in self._tensors:
                self.taken.append(name)
                return self._tensors[name]
        return None

    def need(self, *names: str) -> TensorEntry:
        """Return the first of these tensors that is there. Raise InputError if there is none."""
        found = self.find(*names)
        if found is None:
            raise InputError(f"{self.codes.file}: {self.key} is quantised, and {' or '.join(names)} is missing{_AGAIN}")
        return found

    def drop_activations(self, module: str, stem: str) -> None:
        """Take the tensors for activations, which are not used."""
        for ending in _OF_ACTIVATIONS:
            self.find(f"{module}.{ending}")
            self.find(f"{stem}_{ending}")

    def matrix(self) -> tuple[int, int]:
        """Return the shape of the codes, which must be a matrix. Raise InputError if they are not."""
        if len(self.codes.shape) != 2:
            raise InputError(
                f"{self.codes.file}: {self.key} has the shape {list(self.codes.shape)}; expected a matrix{_AGAIN}"
            )
        return self.codes.shape[0], self.codes.shape[1]

    def require_shape(self, part: TensorEntry, name: str, *legal: tuple[int, ...]) -> None:
        """Raise InputError if a part has none of these shapes."""
        if part.shape not in legal:
            expected = " or ".join(str(list(shape)) for shape in legal)
            raise InputError(
                f"{part.file}: the {name} of {self.key} have the shape {list(part.shape)}; expected {expected}, since "
                f"the codes have the shape {list(self.codes.shape)}{_AGAIN}"
            )

    def require_type(self, part: TensorEntry, name: str, *legal: str) -> None:
        """Raise UnsupportedModelError if a part is stored in none of these types."""
        if part.dtype not in legal:
            raise UnsupportedModelError(
                f"{part.file}: the {name} of {self.key} are stored as {part.dtype}; expected {' or '.join(legal)}"
                f"{_OTHER}"
            )


_Joined = Iterator[tuple[str, QuantisedEntry]]
_FLOATS = ("F32", "F16", "BF16")


def _join_fp8(group: _Group) -> _Joined:
    key, codes = group.key, group.codes
    if codes.dtype not in FLOAT8 or len(codes.shape) < 2:
        return
    scales = group.need(f"{key}_scale_inv", f"{key}_scale")
    group.require_type(scales, "scales", *_FLOATS, "F8_E8M0")
    group.drop_activations(key.removesuffix(".weight"), key)
    yield key, replace(_plain(group, scales, None, group.scheme.block), float32_product=True)


def _plain(
    group: _Group, scales: TensorEntry, zeros: TensorEntry | None, block: tuple[int, int] | None
) -> QuantisedEntry:
    """Return a weight with one code per element. Its scales are per tensor or channel, or by blocks.

    If the codes are stored transposed, the scales are too.
    """
    turned = group.codes.turned
    *experts, rows, columns = _turn(group.codes.shape) if turned else group.codes.shape
    shape = _turn(scales.shape) if turned else scales.shape
    if math.prod(shape) == 1 and not experts:
        block = (rows, columns)
    elif shape in ((rows,), (*experts, rows, 1)):
        block = (1, columns)
    else:
        height, width = block or (1, columns)
        legal = (*experts, -(-rows // height), -(-columns // width))
        group.require_shape(scales, "scales", _turn(legal) if turned else legal)
        block = (height, width)
    if zeros is not None:
        group.require_shape(zeros, "zero points", scales.shape)
    return QuantisedEntry(
        name=group.key,
        layout="turned" if turned else "plain",
        shape=(*experts, rows, columns),
        bits=8,
        codes=group.codes,
        scales=scales,
        zeros=zeros,
        block=block,
    )


def _turn(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with the last two dimensions the other way round."""
    return (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape


def _join_compressed(group: _Group) -> _Joined:
    key, codes = group.key, group.codes
    packed = key.endswith("_packed")
    if not packed and (codes.dtype not in (*FLOAT8, "I8") or key.endswith("_zero_point")):
        return
    name = key.removesuffix("_packed")
    module = _compressed_module(key)
    rule = group.scheme.rule(*(_compressed_module(published) for published in group.published))
    if rule is None:
        raise InputError(
            f"{codes.file}: {key} is quantised, and config_groups in config.json do not name its module; expected a "
            f"target that names it{_AGAIN}"
        )
    scales = group.need(f"{name}_scale")
    group.require_type(scales, "scales", *_FLOATS)
    zeros = group.find(f"{name}_zero_point")
    group.drop_activations(module, name)
    yield name, _packed(group, name, rule, scales, zeros) if packed else _unpacked(group, rule, scales, zeros)


def _compressed_module(key: str) -> str:
    return key.removesuffix("_packed").removesuffix(".weight")


def _unpacked(group: _Group, rule: WeightRule, scales: TensorEntry, zeros: TensorEntry | None) -> QuantisedEntry:
    if rule.is_float != (group.codes.dtype in FLOAT8):
        raise InputError(
            f"{group.codes.file}: {group.key} is stored as {group.codes.dtype}; expected {rule.title}, as config.json "
            f"says{_AGAIN}"
        )
    if rule.is_float:
        zeros = None  # of symmetric codes: all 0
    elif zeros is not None:
        group.require_type(zeros, "zero points", "I8")
    return _plain(group, scales, zeros, rule.block or ((1, rule.group_size) if rule.group_size else None))


def _packed(
    group: _Group, name: str, rule: WeightRule, scales: TensorEntry, zeros: TensorEntry | None
) -> QuantisedEntry:
    """Return a weight whose codes are packed in words along the inputs, and its zero points along the outputs."""
    group.require_type(group.codes, "codes", "I32")
    rows, words = group.matrix()
    columns = words * _WORD_BITS // rule.bits
    width = rule.group_size or columns
    if columns % width:
        raise InputError(
            f"{group.codes.file}: {group.key} has {columns} inputs; expected a multiple of the group size {width}"
            f"{_AGAIN}"
        )
    group.require_shape(scales, "scales", (rows, columns // width), *([(1,)] if width == columns else []))
    height = rows if scales.shape == (1,) else 1
    symmetric_zeros = None
    if zeros is not None and zeros.dtype == "I8" and rule.symmetric:  # older checkpoints have them
        group.require_shape(zeros, "zero points", scales.shape)
        zeros, symmetric_zeros = None, zeros
    if zeros is not None:
        group.require_type(zeros, "zero points", "I32")
        group.require_shape(zeros, "zero points", (-(-rows * rule.bits // _WORD_BITS), columns // width))
    order = group.find(f"{name}_g_idx")
    if order is not None:
        group.require_type(order, "group indices", "I32", "I64")
        group.require_shape(order, "group indices", (columns,))
    return QuantisedEntry(
        name=group.key,
        layout="packed",
        shape=(rows, columns),
        bits=rule.bits,
        codes=group.codes,
        scales=scales,
        zeros=zeros,
        symmetric_zeros=symmetric_zeros,
        order=order,
        stated=group.find(f"{name}_shape"),
        block=(height, width),
    )


def _join_gptq(group: _Group) -> _Joined:
    key, codes = group.key, group.codes
    if not key.endswith(".qweight"):
        return
    module = key.removesuffix(".qweight")
    scales, zeros, order = (group.need(f"{module}.{part}") for part in ("scales", "qzeros", "g_idx"))
    group.require_type(codes, "codes", "I32")
    group.require_type(scales, "scales", *_FLOATS)
    group.require_type(zeros, "zero points", "I32")
    group.require_type(order, "group indices", "I32", "I64")
    words, rows = group.matrix()
    if len(scales.shape) != 2:
        raise InputError(
            f"{scales.file}: the scales of {key} have the shape {list(scales.shape)}; expected a matrix{_AGAIN}"
        )
    columns = math.prod(order.shape)
    bits = words * _WORD_BITS // max(1, columns)
    if bits not in (4, 8):
        raise UnsupportedModelError(f"{codes.file}: {key} has codes of {bits} bits; expected 4 or 8{_OTHER}")
    group.require_shape(order, "group indices", (words * _WORD_BITS // bits,))
    group.require_shape(scales, "scales", (scales.shape[0], rows))
    group.require_shape(zeros, "zero points", (scales.shape[0], rows * bits // _WORD_BITS))
    yield (
        f"{module}.weight",
        QuantisedEntry(
            name=key,
            layout="gptq",
            shape=(rows, columns),
            bits=bits,
            codes=codes,
            scales=scales,
            zeros=zeros,
            order=order,
            block=(1, columns),
        ),
    )


def _join_awq(group: _Group) -> _Joined:
    key, codes = group.key, group.codes
    if not key.endswith(".qweight"):
        return
    module = key.removesuffix(".qweight")
    scales, zeros = (group.need(f"{module}.{part}") for part in ("scales", "qzeros"))
    group.require_type(codes, "codes", "I32")
    group.require_type(scales, "scales", *_FLOATS)
    group.require_type(zeros, "zero points", "I32")
    columns, words = group.matrix()
    rows, width = words * _WORD_BITS // 4, group.scheme.group_size or columns
    group.require_shape(scales, "scales", (-(-columns // width), rows))
    group.require_shape(zeros, "zero points", (-(-columns // width), words))
    yield (
        f"{module}.weight",
        QuantisedEntry(
            name=key,
            layout="awq",
            shape=(rows, columns),
            bits=4,
            codes=codes,
            scales=scales,
            zeros=zeros,
            block=(1, width),
        ),
    )


def _join_mxfp4(group: _Group) -> _Joined:
    key, codes = group.key, group.codes
    if not key.endswith("_blocks"):
        return
    name = key.removesuffix("_blocks")
    scales = group.need(f"{name}_scales")
    group.require_type(codes, "codes", "U8")
    group.require_type(scales, "scales", "U8")
    if len(codes.shape) != 4 or codes.shape[3] != _MX_BYTES:
        raise InputError(
            f"{codes.file}: {key} has the shape {list(codes.shape)}; expected [experts, outputs, groups, {_MX_BYTES}]"
            f"{_AGAIN}"
        )
    experts, rows, groups, _ = codes.shape
    group.require_shape(scales, "scales", (experts, rows, groups))
    # gpt_oss multiplies with (inputs, outputs).
    yield (
        name,
        QuantisedEntry(
            name=key,
            layout="mxfp4",
            shape=(experts, groups * _MX_GROUP, rows),
            bits=4,
            codes=codes,
            scales=scales,
            block=(1, _MX_GROUP),
        ),
    )


_JOINS: Mapping[str, Callable[[_Group], _Joined]] = {
    "fp8": _join_fp8,
    "mxfp4": _join_mxfp4,
    "compressed-tensors": _join_compressed,
    "gptq": _join_gptq,
    "awq": _join_awq,
}
