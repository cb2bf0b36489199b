"""Parallelism in words: ``megatron:tp=4,pp=2,ep=8,etp=1,dp=2``, ``vllm:tp=8,engines=2``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from awexd_transports.errors import InvalidArgument

MAX_RANKS = 65_536

_NUMBER = re.compile("[1-9][0-9]{0,6}")


@dataclass(frozen=True)
class Word:
    """What a word may be: one of ``choices``, else a whole number from 1.

    Attributes:
        default: None where it follows from other words, or is not used.
        zero: whether 0 is a number too.
    """

    meaning: str
    default: str | int | None = 1
    choices: tuple[str, ...] = ()
    zero: bool = False


_ENGINES = {"engines": Word("instances that are alike")}

TRAINERS: dict[str, dict[str, Word]] = {
    "megatron": {
        "tp": Word("tensor parallel size"),
        "pp": Word("pipeline stages"),
        "vpp": Word("virtual stages of each stage"),
        "cp": Word("context parallel size"),
        "dp": Word("data parallel size"),
        "ep": Word("expert parallel size"),
        "etp": Word("expert tensor parallel size; as tp where it is not given", None),
        "first": Word("layers of the first stage, where stages are uneven", None),
        "last": Word("layers of the last stage, where stages are uneven", None),
        "pad": Word("make_vocab_size_divisible_by", 128),
        "mla": Word("whether MLA's down-projections are whole on each rank or cut", "whole", ("whole", "cut")),
    },
    "fsdp": {"shards": Word("ranks that a tensor is cut over"), "replicas": Word("of all shards (HSDP)")},
    "hf": {"ranks": Word("processes that have the whole model")},
}

ENGINES: dict[str, dict[str, Word]] = {
    "vllm": {
        "tp": Word("tensor parallel size"),
        "pp": Word("pipeline stages"),
        "dp": Word("data parallel size"),
        "ep": Word("expert parallel size: dp x tp, or 1 for none"),
        "placement": Word("of experts", "linear", ("linear", "round_robin")),
        **_ENGINES,
    },
    "sglang": {
        "tp": Word("tensor parallel size"),
        "pp": Word("pipeline stages"),
        "ep": Word("expert parallel size"),
        "dp_attention": Word("groups of data parallel attention"),
        "dp_lm_head": Word("1: lm_head is cut as attention is", 0, zero=True),
        "moe_dense_tp": Word("1: dense MLPs are whole on each rank", None),
        "shared": Word("shared experts: cut, fused with the routed ones, or whole", "cut", ("cut", "fused", "whole")),
        **_ENGINES,
    },
    "hf": {"ranks": Word("processes that have the whole model"), **_ENGINES},
}


@dataclass(frozen=True)
class Spec:
    """A parsed spec: its kind, and every word's value, given or by default; None where there is no default."""

    kind: str
    text: str
    values: Mapping[str, str | int | None] = field(default_factory=dict)

    def size(self, word: str, default: int = 1) -> int:
        value = self.values[word]
        return value if isinstance(value, int) else default

    def given(self, word: str) -> int | None:
        value = self.values[word]
        return value if isinstance(value, int) else None

    def choice(self, word: str) -> str:
        return str(self.values[word])


def parse(text: str, kinds: Mapping[str, Mapping[str, Word]]) -> Spec:
    """A spec of one of these kinds (``TRAINERS`` or ``ENGINES``).

    Raises:
        InvalidArgument: an unknown kind or word, one that is said twice, or a value that it cannot have.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in kinds:
        raise InvalidArgument(f"{text!r}: there is no kind {kind!r} here; known: {', '.join(sorted(kinds))}")
    known = kinds[kind]
    values: dict[str, str | int | None] = {word: about.default for word, about in known.items()}
    said: set[str] = set()
    for item in filter(None, (part.strip() for part in rest.split(","))):
        word, equals, value = (part.strip() for part in item.partition("="))
        if word not in known:
            raise InvalidArgument(f"{text!r}: {kind} has no word {word!r}; known: {', '.join(known)}")
        if word in said:
            raise InvalidArgument(f"{text!r}: {word} is said twice; leave one out")
        said.add(word)
        if not equals:
            raise InvalidArgument(f"{text!r}: {word} needs a value, as in {word}={known[word].default or 2}")
        values[word] = _value(text, word, value, known[word])
    return Spec(kind, text.strip(), values)


@contextlib.contextmanager
def fitting(spec: Spec) -> Iterator[None]:
    """Names the spec in what the layout rules refuse."""
    try:
        yield
    except InvalidArgument as error:
        if error.message.startswith(repr(spec.text)):
            raise
        raise InvalidArgument(f"{spec.text!r}: {error}; choose sizes that divide the model's") from error


def _value(text: str, word: str, value: str, about: Word) -> str | int:
    if about.choices:
        if value not in about.choices:
            raise InvalidArgument(f"{text!r}: {word} is one of {', '.join(about.choices)}, not {value!r}")
        return value
    if about.zero and value in ("0", "1"):
        return int(value)
    if about.zero:
        raise InvalidArgument(f"{text!r}: {word} is 0 or 1, not {value!r} ({about.meaning})")
    if not _NUMBER.fullmatch(value):
        raise InvalidArgument(f"{text!r}: {word} is a whole number from 1, not {value!r} ({about.meaning})")
    return int(value)


def check_ranks(spec: Spec, ranks: int) -> int:
    """Refuses jobs that are too large to be meant.

    Raises:
        InvalidArgument: more than ``MAX_RANKS``.
    """
    if ranks > MAX_RANKS:
        raise InvalidArgument(f"{spec.text!r}: {ranks} ranks; at most {MAX_RANKS}")
    return ranks
