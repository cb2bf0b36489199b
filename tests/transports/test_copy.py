from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports import copy as copying
from awexd_transports import kernel, tiles
from awexd_transports.copy import CopyTable, Difference, Row, default_threads, shut_down_threads
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Box
from awexd_transports.threads import MAX_THREADS, spread
from awexd_transports.view import View
from tests.transports.strategies import GUARD, Memory, dense, strided, whole

pytestmark = pytest.mark.usefixtures("each_way")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    shut_down_threads()


def random_bytes(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8))


def row(destination: torch.Tensor, source: torch.Tensor, label: str = "w", *, cast: bool = False) -> Row:
    return Row(View.of(destination), View.of(source), label, cast)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[Box], Memory, Memory]:
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 3, 5, 7, 8, 17)), max_size=4)))
        boxes.append((whole(shape), draw(st.sampled_from(sorted(ITEMSIZE)))))
    return [box for box, _ in boxes], draw(strided(boxes)), draw(strided(boxes))


def scramble(memory: Memory) -> None:
    """Random bytes in the views only."""
    random = np.random.default_rng(7)
    for view in memory.views:
        array = view.bytes_array()
        array[...] = random.integers(-128, 128, array.shape, dtype=np.int8)


@settings(deadline=None)
@given(pairs(), st.integers(1, 3), st.booleans())
def test_any_strides_to_any_strides_are_copied_and_neighbours_stay(
    drawn: tuple[list[Box], Memory, Memory], threads: int, streamed: bool
) -> None:
    """Case 33, with every dtype."""
    _, source, destination = drawn
    scramble(source)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "SHORT_RUN", 1)
        patched.setattr(kernel, "STREAM", 0 if streamed else 1 << 60)
        patched.setattr(kernel, "TILE", 64)
        check_all(source, destination, threads)


def check_all(source: Memory, destination: Memory, threads: int) -> None:
    table = CopyTable(zip(destination.views, source.views, strict=True))
    table.run(threads)
    for to, of in zip(destination.views, source.views, strict=True):
        assert np.array_equal(to.bytes_array(), of.bytes_array())
    assert destination.untouched()
    assert source.untouched()
    assert table.first_difference() is None
    assert table.nbytes == sum(view.nbytes for view in source.views)


def test_every_other_element_and_a_transpose_by_value() -> None:
    """Case 33: the small inputs themselves, as source and as destination."""
    into = torch.full((8,), -1.0)
    CopyTable([row(into[::2], torch.arange(8.0)[::2])]).run()
    assert into.tolist() == [0, -1, 2, -1, 4, -1, 6, -1]
    square, turned = torch.arange(12.0).view(3, 4), torch.zeros(3, 4)
    CopyTable([row(turned.t(), square.t())]).run()
    assert torch.equal(turned, square)
    straight = torch.zeros(4, 3)
    CopyTable([row(straight, square.t())]).run()
    assert torch.equal(straight, square.t())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize(
    "how",
    ["flat", "columns", "long rows", "transposed", "both transposed", "every third", "middle turned", "expanded"],
)
def test_large_tensors_are_cut_into_tiles_that_are_all_of_them(dtype: torch.dtype, how: str) -> None:
    size = dtype.itemsize
    base = random_bytes(12 * MIB).view(dtype)
    target = torch.full((12 * MIB,), GUARD, dtype=torch.uint8).view(dtype)
    side = 1536 if size > 4 else 3072 // size
    cut = base[: side * (len(base) // side)].view(-1, side)
    to = target[: cut.numel()].view(-1, side)
    half = side // 2
    third = cut[: len(cut) // 6 * 6].view(len(cut) // 6, 6, side)
    chosen = {
        "flat": (target[1:-1], base[1:-1]),
        "columns": (to[:, half:], cut[:, half:]),
        "long rows": (target.view(4, -1)[:, 5:], base.view(4, -1)[:, :-5]),
        "transposed": (to, cut.reshape(-1).view(side, -1).t()),
        "both transposed": (to.t()[3:-1], cut.t()[2:-2]),
        "every third": (target[1::3], base[: len(target[1::3])]),
        "middle turned": (target[: third.numel()].view(6, len(third), side).transpose(0, 1), third),
        "expanded": (to[: len(cut) // 2], cut[5].expand(len(cut) // 2, side)),
    }
    destination, source = chosen[how]
    expected = target.clone()
    expected.as_strided(destination.shape, destination.stride(), destination.storage_offset()).copy_(source)
    table = CopyTable([row(destination, source)])
    table.run(2)
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
    assert table.first_difference() is None
    last = tuple(n - 1 for n in destination.shape)
    destination[last] = 2 if destination[last] == 1 else 1
    assert table.first_difference() == Difference("w", last)


def test_rows_that_continue_each_other_become_one_copy() -> None:
    source, destination = random_bytes(1024), torch.zeros(1024, dtype=torch.uint8)
    table = CopyTable(row(destination[at : at + 64], source[at : at + 64]) for at in range(0, 1024, 64))
    assert table._jobs.tiles + sum(len(batch) for batch in table._batches) == 1
    table.run()
    assert torch.equal(source, destination)


@pytest.mark.usefixtures("without_library")
def test_long_flat_runs_are_moved_in_a_part_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "STREAMED", 3 * MIB)
    monkeypatch.setattr(tiles, "default_threads", lambda: 2)
    source, destination = random_bytes(10 * MIB + 77), torch.zeros(10 * MIB + 78, dtype=torch.uint8)
    table = CopyTable([row(destination[1:], source)])
    assert [len(batch) for batch in table._batches] == [1, 1]
    table.run(2)
    assert torch.equal(source, destination[1:])
    assert table.first_difference() is None
    assert all(batch.to for batch in CopyTable([row(destination[: 5 * MIB], source[: 5 * MIB])])._batches)


def test_rows_that_continue_on_one_side_only_stay_apart() -> None:
    source, destination = random_bytes(256), torch.zeros(256, dtype=torch.uint8)
    CopyTable([row(destination[:64], source[:64]), row(destination[64:128], source[128:192])]).run()
    assert torch.equal(destination, torch.cat([source[:64], source[128:192], torch.zeros(128, dtype=torch.uint8)]))


@pytest.mark.parametrize("name", sorted(ITEMSIZE))
def test_every_dtype_is_moved_bit_by_bit(name: str) -> None:
    """NaN payloads, signalling NaN and negative zeros too."""
    source, destination = dense([(whole((5, 3)), name)]), dense([(whole((5, 3)), name)])
    scramble(source)
    CopyTable(zip(destination.views, source.views, strict=True)).run()
    assert np.array_equal(source.raw, destination.raw)


def test_an_unaligned_address_is_copied() -> None:
    source, destination = random_bytes(4001 * 3), torch.zeros(4001 * 3, dtype=torch.uint8)
    of = View(source.data_ptr() + 1, (1000, 2), (12, 4), "float32", source)
    to = View(destination.data_ptr() + 3, (1000, 2), (10, 4), "float32", destination)
    CopyTable([(to, of)]).run()
    assert np.array_equal(to.bytes_array(), of.bytes_array())


def test_negative_strides_are_copied() -> None:
    source, destination = torch.arange(5000), torch.zeros(5000, dtype=torch.int64)
    of = View(source.data_ptr() + 8 * 4999, (5000,), (-8,), "int64", source)
    CopyTable([(View.of(destination), of)]).run()
    assert torch.equal(destination, source.flip(0))


@pytest.mark.parametrize(
    ("destination", "source", "message"),
    [
        (torch.zeros(4, 3), torch.ones(3), r"w: shape \[3\] cannot go to shape \[4, 3\]"),
        (torch.zeros(4, 3), torch.ones(1, 3), "nothing is broadcast"),
        (torch.zeros(()), torch.ones(1), "nothing is broadcast"),
        (torch.zeros(3, 4), torch.ones(4, 3), "nothing is broadcast"),
        (torch.zeros(2, dtype=torch.int8), torch.ones(2), "w: float32 cannot go to int8: no cast was asked for"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), torch.ones(2), "no cast was asked for"),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float16), "no cast was asked for"),
        (torch.zeros(1, 3).expand(4, 3), torch.ones(4, 3), "stride of zero"),
    ],
)
def test_a_row_that_would_broadcast_or_cast_is_refused_by_name(
    destination: torch.Tensor, source: torch.Tensor, message: str
) -> None:
    """Case 37."""
    before = destination.clone()
    with pytest.raises(InvalidArgument, match=message):
        CopyTable([row(destination, source)])
    assert torch.equal(destination.to(torch.float32), before.to(torch.float32))


def test_a_shape_is_refused_even_where_a_cast_was_asked_for() -> None:
    with pytest.raises(InvalidArgument, match="nothing is broadcast"):
        CopyTable([row(torch.zeros(4, 3), torch.ones(3), cast=True)])


@pytest.mark.parametrize("to", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int32"])
@pytest.mark.parametrize("of", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("how", ["whole", "columns", "transposed"])
def test_a_cast_that_was_asked_for_is_torchs(to: str, of: str, how: str) -> None:
    """Case 49: rounding, overflow and NaN as ``copy_`` does them."""
    special = torch.tensor([0.0, -0.0, 1 / 3, 65504.0, 65520.0, 1e-8, -3.5, 448.0, 464.0, 6.817], dtype=torch.float64)
    values = torch.cat([special, torch.linspace(-500, 500, 300 * 400 - 10, dtype=torch.float64)])
    if to.startswith(("float", "bfloat")):
        values[17], values[18] = torch.nan, torch.inf
    source = values.to(getattr(torch, of)).view(300, 400)
    target = torch.zeros(300, 400, dtype=getattr(torch, to))
    chosen = {
        "whole": (target, source),
        "columns": (target[:, 3:333], source[:, 70:]),
        "transposed": (target.view(400, 300), source.t()),
    }
    destination, part = chosen[how]
    expected = target.clone()
    expected.as_strided(destination.shape, destination.stride(), destination.storage_offset()).copy_(part)
    table = CopyTable([row(destination, part, cast=True)])
    table.run(2)
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
    assert table.first_difference() is None
    destination[7, 9] = 1.0
    assert table.first_difference() == Difference("w", (7, 9))


def test_a_cast_to_the_same_dtype_is_a_copy() -> None:
    source, destination = torch.randn(7), torch.zeros(7)
    CopyTable([row(destination, source, cast=True)]).run()
    assert torch.equal(source, destination)


def test_an_fp32_bias_among_bf16_weights_keeps_its_values() -> None:
    """Case 45."""
    bias, weight = torch.linspace(6.817, 7.063, 256), torch.randn(16, 16).to(torch.bfloat16)
    into = torch.zeros(256), torch.zeros(16, 16, dtype=torch.bfloat16)
    CopyTable([row(into[0], bias), row(into[1], weight)]).run()
    assert len(set(into[0].tolist())) == 256
    assert torch.equal(into[1], weight)


def test_padding_of_a_vocabulary_is_left_as_it_was() -> None:
    """Case 42: five real rows into a parameter of six."""
    source, parameter = torch.randn(8, 4), torch.full((6, 4), 7.0)
    CopyTable([row(parameter[:5], source[:5])]).run()
    assert torch.equal(parameter[:5], source[:5])
    assert (parameter[5] == 7).all()


def test_destinations_keep_their_address() -> None:
    """Case 47."""
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    address = parameter.data_ptr()
    CopyTable([row(parameter, torch.ones(4, 4))]).run()
    assert parameter.data_ptr() == address
    assert (parameter == 1).all()


def test_a_table_made_in_inference_mode_runs_outside_and_in_other_threads() -> None:
    """vLLM's workers live in inference mode; the threads that copy do not."""
    source, destination = random_bytes(8 * MIB).view(2048, -1), torch.zeros(2048, 4096, dtype=torch.uint8)
    floats, halves = torch.randn(1 << 20), torch.zeros(1 << 20, dtype=torch.bfloat16)
    with torch.inference_mode():
        table = CopyTable([row(destination[:, :2048], source[:, :2048]), row(halves, floats, cast=True)])
        table.run(3)
    table.run(3)
    assert torch.equal(destination[:, :2048], source[:, :2048])
    assert torch.equal(halves, floats.to(torch.bfloat16))
    with torch.inference_mode():
        assert table.first_difference() is None


def test_rows_without_elements_vanish() -> None:
    table = CopyTable([row(torch.zeros(0, 4), torch.zeros(0, 4)), row(torch.zeros(4, 0), torch.ones(4, 0))])
    assert (table.nbytes, table._batches) == (0, [])
    table.run()
    assert table.first_difference() is None


def test_first_difference_names_the_row_and_the_element_in_row_order() -> None:
    sources = [random_bytes(4 * MIB).view(1024, -1) for _ in range(3)]
    into = [torch.zeros(4096, 1024, dtype=torch.uint8).t() for _ in sources]
    table = CopyTable(row(to, of, f"w{at}") for at, (to, of) in enumerate(zip(into, sources, strict=True)))
    table.run(2)
    assert table.first_difference(2) is None
    for at, index in ((2, (0, 0)), (1, (900, 5)), (1, (3, 4000))):
        into[at][index] += 1
    assert table.first_difference(2) == Difference("w1", (3, 4000))


def test_first_difference_sees_the_sign_of_zero_and_accepts_nan() -> None:
    source = torch.tensor([float("nan"), 0.0, 1.0])
    destination = source.clone()
    table = CopyTable([row(destination, source)])
    assert table.first_difference() is None
    destination[1] = -0.0
    assert table.first_difference() == Difference("w", (1,))


def test_first_difference_of_a_scalar() -> None:
    source, destination = torch.tensor(1.0), torch.tensor(2.0)
    assert CopyTable([row(destination, source)]).first_difference() == Difference("w", ())


def test_a_table_keeps_its_memory_alive_and_no_longer() -> None:
    source, destination = torch.ones(300, 300).t(), torch.zeros(300, 300)
    halves = torch.zeros(300, 300, dtype=torch.bfloat16)
    table = CopyTable([row(destination, source), row(halves, source, cast=True)])
    gone = [weakref.ref(source), weakref.ref(destination), weakref.ref(halves)]
    del source, destination, halves
    gc.collect()
    assert all(ref() is not None for ref in gone)
    table.run()
    del table
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_threads_must_be_positive_and_are_bounded() -> None:
    source, destination = random_bytes(8 * MIB), torch.zeros(8 * MIB, dtype=torch.uint8)
    table = CopyTable([row(destination, source)])
    with pytest.raises(InvalidArgument):
        table.run(0)
    table.run(10_000)
    assert torch.equal(source, destination)
    assert threading.active_count() <= MAX_THREADS + 2
    assert 1 <= default_threads() <= 8


@pytest.mark.usefixtures("without_library")
def test_small_tables_start_no_thread() -> None:
    before = threading.active_count()
    count = 3 * copying.BATCH_ROWS
    source, destination = random_bytes(count * 128), torch.zeros(count * 128, dtype=torch.uint8)
    places = [slice(at, at + 64) for at in range(0, count * 128, 128)]
    table = CopyTable(row(destination[place], source[place]) for place in places)
    table.run(4)
    assert len(table._batches) == 3
    assert table.first_difference() is None
    assert threading.active_count() == before


def test_tables_run_from_several_threads_at_once() -> None:
    sources = [random_bytes(6 * MIB + at) for at in range(4)]
    into = [torch.zeros_like(source) for source in sources]
    tables = [CopyTable([row(to, of)]) for to, of in zip(into, sources, strict=True)]
    callers = [threading.Thread(target=table.run, args=(3,)) for table in tables]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(torch.equal(a, b) for a, b in zip(into, sources, strict=True))


@pytest.mark.usefixtures("without_library")
def test_a_failing_step_is_raised_not_swallowed() -> None:
    """Case 1, at the bottom: also when it fails on another thread."""
    source, destination = random_bytes(32 * MIB), torch.zeros(32 * MIB, dtype=torch.uint8)
    table = CopyTable([row(destination, source)])

    def fail(destination: object, source: object) -> None:
        raise OSError("no such page")

    for batch in (table._batches[0], table._batches[-1]):
        batch.steps.append((fail, None, None))
        with pytest.raises(OSError, match="no such page"):
            table.run(2)
        batch.steps.pop()
    table.run(2)
    assert torch.equal(source, destination)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_copies_with_threads_of_its_own() -> None:
    """Also strided rows: torch's own threads would hang in the child."""
    source, destination = random_bytes(8 * MIB), torch.zeros(8 * MIB, dtype=torch.uint8)
    square = torch.zeros(2048, 4096, dtype=torch.uint8)
    table = CopyTable([row(destination, source), row(square, source.view(4096, 2048).t())])
    table.run(2)
    destination.zero_()
    child = os.fork()
    if child == 0:
        table.run(2)
        mine = any(thread.name.startswith("awexd-copy") for thread in threading.enumerate())
        os._exit(0 if mine and np.array_equal(source.numpy(), destination.numpy()) else 1)
    handle = os.pidfd_open(child)
    try:
        if not select.select([handle], [], [], 30)[0]:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(handle)
    assert os.waitpid(child, 0)[1] == 0


def test_what_comes_after_a_row_is_called_once_a_run_when_its_bytes_are_there() -> None:
    """Also rows of many tiles, and rows that would otherwise be joined with their neighbours."""
    source, destination = random_bytes(9 * MIB), torch.zeros(9 * MIB, dtype=torch.uint8)
    places = [slice(at, at + 3 * MIB // 2) for at in range(0, 9 * MIB, 3 * MIB // 2)]
    seen: list[int] = []

    def look(at: int) -> None:
        assert torch.equal(source[places[at]], destination[places[at]])
        seen.append(at)

    rows = [
        Row(View.of(destination[place]), View.of(source[place]), after=partial(look, at))
        for at, place in enumerate(places)
    ]
    table = CopyTable(rows)
    for _ in range(2):
        seen.clear()
        destination.zero_()
        table.run(2)
        assert sorted(seen) == list(range(len(places)))


def test_memory_that_is_no_tensors_can_be_both_sides() -> None:
    """A mapping of shared memory is an address and an owner."""
    held = ctypes.create_string_buffer(bytes(range(64)), 64)
    into = ctypes.create_string_buffer(64)
    of = View.packed(ctypes.addressof(held), (4, 4), "float32", held)
    to = View.packed(ctypes.addressof(into), (4, 4), "float32", into)
    CopyTable([Row(to.sub((slice(1, 3), slice(0, 4))), of.sub((slice(1, 3), slice(0, 4))))]).run()
    assert into.raw == bytes(16) + bytes(range(16, 48)) + bytes(16)


def test_no_thread_is_at_work_once_a_failure_is_raised() -> None:
    """Memory may be unmapped then: also where the others take long."""
    started, ended = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        go.wait(10)
        ended.set()

    def fail() -> None:
        assert started.wait(10)
        threading.Timer(0.2, go.set).start()
        raise OSError("no such page")

    go = threading.Event()
    here = threading.get_ident()
    with pytest.raises(OSError, match="no such page"):
        spread([None, None], lambda _: fail() if threading.get_ident() == here else slow(), 2)
    assert ended.is_set()
