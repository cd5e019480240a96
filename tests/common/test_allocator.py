"""What is freed stays with the process, so the next message of that size needs no fresh pages."""

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource
from common.allocator import keep_freed_memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def fill_and_free():
    before, blocks = faults(), [bytes(1 << 20) for _ in range(16)]
    for block in blocks:
        ctypes.memset(id(block) + 64, 1, (1 << 20) - 64)
    del block, blocks
    return faults() - before
assert keep_freed_memory(), "this malloc is not glibc's"
fill_and_free()
print(fill_and_free())
"""


@pytest.mark.unit
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc's malloc is told")
def test_memory_that_was_freed_is_used_again_without_fresh_pages() -> None:
    # 16 blocks of 1 MiB are 4096 pages of 4 KiB: without the setting each of them faults again.
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert int(ran.stdout) < 409
