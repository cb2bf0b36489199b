from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import InvalidArgument
from awexd_transports.view import View, overlapping
from tests.transports.strategies import strided, whole

DTYPES = [name for name in sorted(ITEMSIZE) if isinstance(getattr(torch, name, None), torch.dtype)]
PLAIN = [name for name in DTYPES if not name.startswith(("q", "bits"))]


@pytest.mark.parametrize("name", PLAIN)
def test_view_of_a_tensor_of_any_dtype(name: str) -> None:
    tensor = torch.zeros(6 * ITEMSIZE[name], dtype=torch.uint8).view(getattr(torch, name)).view(2, 3)
    view = View.of(tensor)
    size = ITEMSIZE[name]
    assert (view.address, view.shape, view.strides) == (tensor.data_ptr(), (2, 3), (3 * size, size))
    assert (view.dtype, view.nbytes, view.numel) == (name, 6 * size, 6)


def test_view_of_strided_and_transposed_tensors_keeps_their_strides() -> None:
    """Case 33."""
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    for tensor in (base.t(), base[::2, 1::3], base[:, 2], base[1:1], torch.tensor(3.0), base.expand(2, 4, 6)):
        view = View.of(tensor)
        assert view.strides == tuple(4 * step for step in tensor.stride())
        assert np.array_equal(view.bytes_array().view("<f4")[..., 0], tensor.numpy())


def test_view_keeps_its_owner_alive_and_no_longer() -> None:
    tensor = torch.zeros(4)
    gone = weakref.ref(tensor)
    view = View.of(tensor)
    del tensor
    gc.collect()
    assert gone() is not None
    part = view.sub((slice(0, 2),))
    del view
    assert gone() is not None
    del part
    gc.collect()
    assert gone() is None


def freed() -> torch.Tensor:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


class Distributed(torch.Tensor):
    """What a DTensor looks like from outside, without a process group."""

    def to_local(self) -> torch.Tensor:
        return torch.zeros(1)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "meta": (lambda: torch.zeros(2, device="meta"), "device meta"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
    "conjugated": (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "conjugated"),
    "negated": (lambda: torch.zeros(2, dtype=torch.complex64).conj().imag, "negated"),
    "without storage": (freed, "freed or shrunk to 0"),
    "distributed": (lambda: torch.zeros(2).as_subclass(Distributed), "local tensor"),
    "no tensor": (lambda: np.zeros(3), "ndarray is not a tensor"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("what", REFUSED)
def test_view_refuses_naming_why(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(InvalidArgument, match=message):
        View.of(make())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning", "ignore:.*quantiz:DeprecationWarning")
def test_view_refuses_quantised_tensors() -> None:
    quantised = torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)
    with pytest.raises(InvalidArgument, match="quantised"):
        View.of(quantised)


def test_view_refuses_a_tensor_longer_than_its_shrunk_storage() -> None:
    tensor = torch.zeros(8)[2:]
    tensor.untyped_storage().resize_(16)
    with pytest.raises(InvalidArgument, match="shrunk to 16"):
        View.of(tensor)


def test_packed_is_row_major() -> None:
    assert View.packed(4096, (2, 3, 4), "bfloat16", None).strides == (24, 8, 2)
    assert View.packed(4096, (), "float32", None).nbytes == 4


def test_sub_takes_slices_of_a_box() -> None:
    view = View.packed(0, (4, 6), "float32", None)
    part = view.sub((slice(1, 3), slice(2, 5)))
    assert (part.address, part.shape, part.strides) == (4 * (6 + 2), (2, 3), (24, 4))


@pytest.mark.parametrize(
    "slices", [(slice(0, 5), slice(0, 1)), (slice(-1, 2), slice(0, 1)), (slice(3, 2), slice(0, 1)), (slice(0, 1),),
               (slice(0, 4, 2), slice(0, 1))]
)  # fmt: skip
def test_sub_refuses_what_is_not_inside(slices: tuple[slice, ...]) -> None:
    with pytest.raises(InvalidArgument):
        View.packed(0, (4, 6), "float32", None).sub(slices)


def test_tensor_is_the_same_memory() -> None:
    base = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    again = View.of(base.t()).tensor()
    assert torch.equal(again, base.t())
    again[1, 2] = 99
    assert base[2, 1] == 99
    assert View.of(base[:0]).tensor().shape == (0, 4)


def bytes_of(view: View) -> list[int]:
    starts = np.array([view.address])
    for n, step in zip(view.shape, view.strides, strict=True):
        starts = (starts[:, None] + np.arange(n) * step).reshape(-1)
    return [int(at) + byte for at in starts for byte in range(view.itemsize)]


@st.composite
def placed(draw: st.DrawFn) -> View:
    """Any view, also with strides that make it overlap itself or run backwards."""
    dims = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0, 4)) for _ in range(dims))
    dtype = draw(st.sampled_from(("uint8", "bfloat16", "float32")))
    strides = tuple(draw(st.integers(-6, 12)) * draw(st.sampled_from((1, ITEMSIZE[dtype]))) for _ in range(dims))
    return View(draw(st.integers(1000, 1040)), shape, strides, dtype)


@settings(max_examples=400, deadline=None)
@given(st.lists(placed(), max_size=5))
def test_overlapping_is_exact(views: list[View]) -> None:
    labelled = [(str(at), view) for at, view in enumerate(views)]
    found = overlapping(labelled)
    held = [bytes_of(view) for view in views]
    alone = [at for at, mine in enumerate(held) if len(mine) != len(set(mine))]
    pairs = {
        (str(a), str(b)) for a in range(len(held)) for b in range(len(held)) if a != b and set(held[a]) & set(held[b])
    }
    if alone:
        assert found is not None
        assert found[0] == found[1]
        assert int(found[0]) in alone
    elif pairs:
        assert found in pairs
    else:
        assert found is None


@settings(deadline=None)
@given(st.data())
def test_views_side_by_side_do_not_overlap(data: st.DataObject) -> None:
    memory = data.draw(strided([(whole((3, 4)), "bfloat16"), (whole((2, 2, 2)), "float32"), (whole((5,)), "uint8")]))
    assert overlapping([(str(at), view) for at, view in enumerate(memory.views)]) is None


def test_columns_of_one_tensor_interleave_without_overlapping() -> None:
    base = torch.zeros(512, 96, dtype=torch.bfloat16)
    parts = [(f"c{at}", View.of(base[:, at::3])) for at in range(3)] + [("after", View.of(torch.zeros(4)))]
    assert overlapping(parts) is None
    assert overlapping([*parts, ("one", View.of(base[7, 50:51]))]) == ("c2", "one")


def test_a_view_half_an_element_off_the_others_grain_overlaps() -> None:
    even, odd = View(1000, (4,), (8,), "float32"), View(1006, (2,), (8,), "float32")
    assert overlapping([("even", even), ("odd", odd)]) == ("even", "odd")
    assert overlapping([("even", even), ("between", View(1004, (2,), (8,), "float32"))]) is None


def test_two_names_of_one_parameter_overlap() -> None:
    tensor = torch.zeros(4, 4)
    assert overlapping([("a", View.of(tensor)), ("b", View.of(tensor[3]))]) == ("a", "b")


def test_overlapping_of_a_large_model_marks_no_bytes_where_intervals_are_apart() -> None:
    """Intervals of 400 GiB that meet nowhere: must not allocate."""
    views = [(str(at), View.packed(at << 30, (1 << 15, 1 << 14), "bfloat16", None)) for at in range(400)]
    assert overlapping(views) is None
    assert overlapping([*views, ("x", View.packed((7 << 30) - 1, (2,), "uint8", None))]) == ("6", "x")
