"""These tests run the Triton kernels: through the interpreter, or on a GPU where one is.

The interpreter must be chosen before anything imports triton, so they are collected only in a process that was started
for them (`tests/kernels/test_kernels_interpreted.py` starts it).
"""

from __future__ import annotations

import os

import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
