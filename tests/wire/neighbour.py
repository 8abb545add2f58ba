"""The other side of shared memory, in a process of its own: python neighbour.py ROLE DESCRIPTOR-OF-THE-DOOR.

Lines of JSON come in on stdin and go out on stdout.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import signal
import socket
import sys

import torch

from darknight.types import OpSpec, Weights
from darknight.wire.mapped import Mapped
from darknight.wire.segments import NOTE
from darknight.wire.shared_memory import Host, Memory


def say(words):
    print(json.dumps(words), flush=True)


def worker(door):
    """Doubles what is at one place into another."""
    view = Mapped(door, lambda nbytes: None)
    for line in sys.stdin:
        share, answer, shape = json.loads(line)
        tensor = view.tensor(tuple(share), torch.int64, tuple(shape), writable=False)
        view.tensor(tuple(answer), torch.int64, tuple(shape), writable=True).copy_(2 * tensor)
        say("done")


def enclave(door):
    """Puts a share and weights into shared memory, and stays."""
    memory = Memory(Host(), door)
    block = memory.put(torch.full((1000,), 7, dtype=torch.int64))
    tensor = torch.arange(1000)
    shared = memory.put_weights(Weights(layer="a", version=0, op=OpSpec("linear"), prime=None, tensor=tensor))
    say([block[:2], shared[:2]])
    signal.pause()


def attacker(door):
    """Tries everything on three segments; says for each kind what succeeded."""
    results = {}
    for _ in range(3):
        packet, descriptors, _, _ = socket.recv_fds(door, 100, 1)
        kind, _, size = NOTE.unpack(packet)
        results[kind] = attack(descriptors[0], size)
    say(results)


def attack(descriptor, size):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]

    def succeed(code):
        if code != 0:
            raise OSError(ctypes.get_errno(), "refused")

    def reopened():
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)

    def protect():
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        succeed(libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE))

    tries = {
        "truncate": lambda: os.ftruncate(descriptor, 0),
        "truncate reopened": lambda: os.truncate(f"/proc/self/fd/{descriptor}", 0),
        "grow": lambda: os.ftruncate(descriptor, 2 * size),
        "map": lambda: mmap.mmap(descriptor, size),
        "map reopened": lambda: mmap.mmap(reopened(), size),
        "write": lambda: os.write(descriptor, b"!"),
        "write reopened": lambda: os.write(reopened(), b"!"),
        "mprotect": protect,
        "punch a hole": lambda: succeed(libc.fallocate(descriptor, 3, 0, 4096)),
        "seal": lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK),
    }
    done = []
    for name, attempt in tries.items():
        try:
            attempt()
            done.append(name)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES):  # it failed for another reason: no proof of anything
                raise
    return done


if __name__ == "__main__":
    roles = {"worker": worker, "enclave": enclave, "attacker": attacker}
    roles[sys.argv[1]](socket.socket(fileno=int(sys.argv[2])))
