"""What becomes of freed memory: kept for the next message, within a bound.

Fresh pages cost several times the copy of what is written to them. Left alone, glibc returns the memory of every large
message to the kernel as soon as it is freed and asks for new pages at the next; a broker spends half its time so.
"""

import ctypes

KEPT_BYTES = 256 << 20
"""freed memory at the end of a heap that a process may keep"""
MAPPED_ALONE_BYTES = 32 << 20
"""what is as large gets pages of its own, which are returned when it is freed; glibc takes no larger bound"""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed_memory() -> bool:
    """Let this process keep up to `KEPT_BYTES` that it frees; False where malloc is not glibc's, and no change."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # Each of the two alone would freeze the other where it stands, at 128 KiB: both or none.
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_ALONE_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
