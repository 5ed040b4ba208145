"""How a process that computes on a CPU is set up."""

from __future__ import annotations

import ctypes
import gc

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**30


def use_one_core() -> None:
    """One torch thread, and freed memory is kept.

    Two busy threads beside a busy neighbour collapse. And glibc returns large blocks to the system at once: an FM run, with some ten
    activations of some MB, then pays for each of their pages anew, which took 1.4 to 1.8 times as long. Other C libraries are left as
    they are.
    """
    torch.set_num_threads(1)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def keep_loaded() -> None:
    """To be called once all is loaded: the collector of cycles never looks at it again.

    Libraries and models are some million objects that stay; every full collection went through them, a pause of .3 s.
    """
    gc.collect()
    gc.freeze()
