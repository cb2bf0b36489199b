from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from awexd_transports.names import FIELD, MAX_FIELDS, TABLE_LIMIT, Names, is_template, keys, numbered, pack

ALPHABET = st.sampled_from(
    ["model", "layers", "0", "1", "7", "00", "10", "03", "999999999", "1000000000", ".", "%", "_", "é", "٣"]
)
TEXTS = st.lists(st.lists(ALPHABET, min_size=1, max_size=14).map("".join), min_size=1, max_size=8)


@given(TEXTS)
def test_names_come_back_letter_by_letter(texts: list[str]) -> None:
    names = Names.of(texts)
    assert names.texts() == texts
    assert [names.text(row) for row in range(len(names))] == texts
    assert all(is_template(template) for template in names.templates)
    assert names.numbers.shape[1] <= MAX_FIELDS


@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_keys_are_equal_exactly_where_names_are(lists: list[list[str]]) -> None:
    flat = [text for texts in lists for text in texts]
    found = keys([Names.of(texts) for texts in lists]).tolist()
    assert len({*zip(found, flat, strict=True)}) == len(set(flat)) == len(set(found))


def test_regular_names_share_their_templates() -> None:
    names = Names.of([f"model.layers.{at}.mlp.experts.{e}.w2.weight" for at in range(3) for e in range(4)])
    assert names.templates == (f"model.layers.{FIELD}.mlp.experts.{FIELD}.w{FIELD}.weight",)
    assert names.numbers[5].tolist() == [1, 1, 2]


@pytest.mark.parametrize(
    ("text", "template"),
    [
        ("a.0.b", "a.#.b"),
        ("a.07.b", "a.07.b"),
        ("a.00", "a.00"),
        ("1234567890", "1234567890"),
        ("123456789", "#"),
        ("0.1.2.3.4.5.6.7", "#.#.#.#.#.#.6.7"),
        ("bf16", "bf#"),
    ],
)
def test_only_numbers_that_come_back_as_they_were_become_fields(text: str, template: str) -> None:
    assert Names.of([text]).templates == (template.replace("#", FIELD),)


@pytest.mark.parametrize(
    "text", ["a.1", f"a.0{FIELD}", f"{FIELD}{FIELD}", f"{FIELD}7", f"1.{FIELD}", ".".join(FIELD * 7)]
)
def test_what_names_never_give_is_no_template(text: str) -> None:
    assert not is_template(text)


@given(
    st.integers(1, 6).flatmap(
        lambda width: st.lists(
            st.tuples(*[st.sampled_from((0, 1, 2, 10**9 - 1, (1 << 40) + 3, (1 << 61) + 1))] * width),
            min_size=1,
            max_size=12,
        )
    )
)
def test_packed_rows_are_equal_exactly_where_the_rows_are(rows: list[tuple[int, ...]]) -> None:
    """Also where their product is beyond 64 bits."""
    packed = pack(np.array(rows, np.int64).T).tolist()
    assert len(set(zip(packed, rows, strict=True))) == len(set(rows)) == len(set(packed))


def test_packed_rows_do_not_wrap_around() -> None:
    """In 64 bits the first column would be multiplied away."""
    rows = [(0, 0, 5), (1, 0, 5), (0, 0, 5), ((1 << 32) - 1,) * 3]
    packed = pack(np.array(rows, np.int64).T).tolist()
    assert packed[0] == packed[2]
    assert len(set(packed)) == 3


@pytest.mark.parametrize("spread", [1, TABLE_LIMIT * 100])
@given(st.lists(st.integers(0, 50), max_size=12))
def test_keys_are_numbered_by_table_as_by_sorting(spread: int, keys: list[int]) -> None:
    """The second spread is too wide for a table."""
    found = numbered(np.array(keys, np.int64) * spread)
    assert found.dtype == np.int64
    assert found.tolist() == [sorted(set(keys)).index(key) for key in keys]


def test_packing_leaves_its_columns_alone() -> None:
    columns = np.array([[1, 2], [3, 4]])
    assert pack(columns).tolist() == [8, 14]
    assert columns.tolist() == [[1, 2], [3, 4]]
