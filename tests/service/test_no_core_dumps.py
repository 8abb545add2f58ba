"""Core dumps are off, or the enclave does not start; Gramine, whose kernel has no prctl, is the one exception."""

import subprocess
import sys

import pytest

# A filter of the kernel's own, so that prctl(PR_SET_DUMPABLE, ...) fails as it does inside Gramine: load the number of
# the call, load its first argument, compare, return.
FILTER = """
import ctypes, struct, sys
from darknight.service.program import no_core_dumps
libc = ctypes.CDLL(None, use_errno=True)
steps = [(0x20, 0, 0, 0), (0x15, 0, 3, 157), (0x20, 0, 0, 16), (0x15, 0, 1, 4), (0x06, 0, 0, 0x50000 | {code})]
steps.append((0x06, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
bound = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program)))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, bound, 0, 0) == 0
assert libc.prctl(4, 0, 0, 0, 0) == -1 and ctypes.get_errno() == {code}
no_core_dumps(inside_gramine={inside})
"""
ENOSYS, EPERM = 38, 1


def started(*, code: int, inside: bool) -> subprocess.CompletedProcess[str]:
    script = FILTER.format(code=code, inside=inside)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


def test_a_kernel_without_prctl_is_accepted_inside_gramine():
    done = started(code=ENOSYS, inside=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("code", "inside"), [(ENOSYS, False), (EPERM, True)])
def test_core_dumps_that_stay_on_end_it(code, inside):
    done = started(code=code, inside=inside)
    assert done.returncode == 1
    assert "DarKnightError: core dumps cannot be switched off here" in done.stderr
