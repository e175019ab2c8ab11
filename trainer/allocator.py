"""Keep large blocks in the process: by default glibc returns each to the kernel and faults its pages in again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Serve every block from the heap and never trim it; memory use stays at its peak.

    Returns:
        Whether the C library took the settings; others than glibc have none.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    top_pad = 64 << 20
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, top_pad))
    return all(mallopt(name, value) == 1 for name, value in settings)
