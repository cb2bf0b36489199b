"""What needs an NVIDIA GPU: `make test-gpu` on a machine that has one; elsewhere these are skipped."""

from __future__ import annotations

import itertools

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "needs an NVIDIA GPU: run `make test-gpu` on a machine that has one"
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def context() -> None:
    """CUDA's own descriptors and threads are there before a test counts any."""
    ones = [torch.ones(1, device=device) for device in range(torch.cuda.device_count())]
    for one, other in itertools.permutations(ones, 2):
        one.copy_(other)
    for one in ones:
        one.cpu()
