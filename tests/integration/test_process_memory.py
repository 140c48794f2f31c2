"""Large blocks that were freed go back to the system, so that memory does not grow with closed connections."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

# The first block, once freed, raises the size from which glibc maps blocks: the second one then comes from the heap.
PROGRAM = """
import ctypes, sys

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
        ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallinfo2.restype = Info
if sys.argv[1] == "tuned":
    from vaultevents.wiring.process_memory import tune_memory
    tune_memory()
libc.free(libc.malloc(16 << 20))
before = libc.mallinfo2().hblkhd
block = libc.malloc(256 << 10)
print(libc.mallinfo2().hblkhd - before >= 256 << 10)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc 2.33 or newer")
@pytest.mark.parametrize(("mode", "mapped"), [("tuned", "True"), ("as it is", "False")])
def test_freed_blocks_return_to_the_system(mode: str, mapped: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == mapped
