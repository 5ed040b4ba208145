"""Shared by the operator tests: one thread, so that timings and sums do not depend on the machine's load."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
