"""Runs a command as a process that can write below some folders and nowhere else: confined.py [FOLDER...] -- COMMAND...

It may leave cores as large as this account's can be, so that it is the command's own doing if there is none. It has not
the right to read the memory of every process, which the superuser's processes otherwise have. Without a folder it can
write anywhere.
"""

import ctypes
import os
import resource
import struct
import sys

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls of Landlock
_VERSION, _BENEATH = 1, 1
_CAPBSET_DROP, _NO_NEW_PRIVILEGES = 24, 38
_READING = (19, 21, 38)  # CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON
_WRITE = sum(1 << bit for bit in (1, *range(4, 15)))  # write, remove, make of any kind, move, truncate

_libc = ctypes.CDLL(None, use_errno=True)


def can_confine() -> bool:
    """Whether this kernel lets a process give up rights to files, to move and to truncate them too."""
    return _libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION) >= 3


def _confine(folders: list[str]) -> None:
    ruleset = _checked(_libc.syscall(_CREATE, struct.pack("Q", _WRITE), ctypes.c_size_t(8), 0))
    for folder in folders:
        parent = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        _checked(_libc.syscall(_ADD, ruleset, _BENEATH, struct.pack("=Qi", _WRITE, parent), 0))
        os.close(parent)
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(_libc.syscall(_RESTRICT, ruleset, 0))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "the process cannot be confined")
    return result


if __name__ == "__main__":
    border = sys.argv.index("--")
    largest = resource.RLIM_INFINITY if os.getuid() == 0 else resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (largest, largest))
    for capability in _READING:  # it fails for others than the superuser, who have no such right
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    if border > 1 and can_confine():
        _confine(sys.argv[1:border])
    os.execv(sys.argv[border + 1], sys.argv[border + 1 :])
