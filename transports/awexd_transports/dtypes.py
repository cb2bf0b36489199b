"""The dtypes that can be moved: torch's names and their bytes an element.

Sub-byte integers and floats that torch packs (``float4_e2m1fn_x2``, ``quint4x2``) count as the packed element that the
tensor's shape counts, so a box never cuts through a byte.
"""

from __future__ import annotations

from awexd_transports.errors import InvalidArgument

ITEMSIZE: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""torch dtype name (without ``torch.``) to bytes an element."""


def dtype_name(dtype: object) -> str:
    """``torch.bfloat16`` or ``"bfloat16"`` to ``"bfloat16"``.

    Raises:
        InvalidArgument: not a dtype that can be moved.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise InvalidArgument(f"{dtype!r} is not a dtype that awexd can move; known: {', '.join(sorted(ITEMSIZE))}")
    return name
