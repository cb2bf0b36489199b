from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from awexd.dryrun.command import dry_pair
from awexd.dryrun.picture import BOX, MOST, picture
from awexd.dryrun.report import Pair, Report, Side, as_json, examine
from tests.awexd.dryrun_models import tiny
from tests.awexd.test_dryrun_report import held, small

SVG = "{http://www.w3.org/2000/svg}"


def drawn(report: Report) -> ElementTree.Element:
    return ElementTree.fromstring(picture(report))


def links(root: ElementTree.Element) -> dict[tuple[str, str], int]:
    paths = root.iter(f"{SVG}path")
    return {
        (path.attrib["data-source"], path.attrib["data-destination"]): int(path.attrib["data-bytes"]) for path in paths
    }


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_a_line_for_each_link_with_its_bytes() -> None:
    report = examine(small())
    root = drawn(report)
    told = as_json(report)["links"]
    assert links(root) == {(f"rank {one['source']}", f"{one['engine']} / {one['rank']}"): one["bytes"] for one in told}
    assert {"rank 0", "rank 1", "e / 0", "e / 1", "f / 0", "9 B", "14 B", "17 B"} <= set(texts(root))
    assert (root.tag, root.attrib["role"]) == (f"{SVG}svg", "img")
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")


def test_lines_of_a_box_lie_side_by_side_each_as_wide_as_its_bytes() -> None:
    root = drawn(examine(small()))
    edges: dict[str, list[tuple[float, float]]] = {}
    for path in root.iter(f"{SVG}path"):
        width = float(path.attrib["stroke-width"])
        assert width == pytest.approx(BOX * int(path.attrib["data-bytes"]) / 17, abs=0.01)  # 17 is the largest load
        _, leaves, *_, reaches = [float(number) for number in re.findall(r"[0-9.]+", path.attrib["d"])]
        for side, y in (("source", leaves), ("destination", reaches)):
            edges.setdefault(path.attrib[f"data-{side}"], []).append((y - width / 2, y + width / 2))
    for lines in edges.values():
        for above, below in pairwise(sorted(lines)):
            assert above[1] == pytest.approx(below[0], abs=0.05)
    largest = sorted(edges["rank 1"])
    assert largest[-1][1] - largest[0][0] == pytest.approx(BOX, abs=0.1)


@pytest.mark.parametrize(
    ("train", "infer"),
    [
        ("megatron:tp=2,dp=10", "vllm:tp=2,engines=3"),
        ("fsdp:shards=64", "sglang:tp=4,engines=5"),
        ("hf:ranks=3", "vllm:tp=2,engines=40"),
    ],
)
def test_many_ranks_share_boxes_and_no_byte_is_lost(train: str, infer: str) -> None:
    report = examine(dry_pair(tiny("qwen3"), train, infer))
    assert report.moved
    root = drawn(report)
    found = links(root)
    assert sum(found.values()) == int(report.moved.traffic.nbytes.sum())
    sides = [{names[side] for names in found} for side in (0, 1)]
    assert all(1 < len(side) <= MOST for side in sides)
    assert train in texts(root)[0]


def test_names_are_escaped() -> None:
    pair = Pair(Side('<t> & "u"', [held(("a", 2, 0, 2))]), [Side("e<&>", [held(("a", 2, 0, 2))])])
    root = drawn(examine(pair))
    assert texts(root)[0] == '<t> & "u" to e<&>'
    assert links(root) == {("rank 0", "e<&> / 0"): 2}


def test_pair_that_does_not_fit_has_no_lines() -> None:
    report = examine(Pair(Side("t", [held(("a", 2, 0, 2))]), [Side("e", [held(("b", 2, 0, 2))])]))
    root = drawn(report)
    assert links(root) == {}
    assert "does not work" in texts(root)[1]
