"""Nodes and memory that are gone after the test; tests run on the daemon's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop

from tests.peers.nodes import Fetching, Node, Segment


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True, scope="session")
def signals_of_uvloop() -> None:
    """libuv opens a pipe for signals at its first use, and keeps it."""
    uvloop.new_event_loop().close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def segment(stack: ExitStack) -> Callable[..., Segment]:
    """Makes segments: of so many bytes, random with a seed."""
    return lambda nbytes, seed=None: stack.enter_context(Segment(nbytes, seed))


@pytest.fixture
def node(stack: ExitStack, request: pytest.FixtureRequest) -> Callable[..., Node]:
    """Starts nodes that serve by the class's transport."""

    def start(name: str, segments: dict[int, Segment], *, offer: bool = True, **options: object) -> Node:
        made = Node(request.cls.transport, name, segments, **options)  # type: ignore[arg-type]
        stack.callback(made.close)
        if offer:
            made.ask("offer")
        return made

    return start


@pytest.fixture
def fetching(stack: ExitStack, request: pytest.FixtureRequest) -> Callable[..., Fetching]:
    """Starts processes that fetch by the class's transport."""

    def start(*arguments: Any, **options: Any) -> Fetching:
        made = Fetching(request.cls.transport, *arguments, **options)
        stack.callback(made.close)
        return made

    return start
