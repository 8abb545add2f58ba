"""`darknight`, killed by SIGKILL just before its N-th operation on the disk: python crashing.py N enclave ...

With "count" in the place of N it is not killed; CRASHING_COUNT names a file that gets a dot for each operation.
"""

import os
import signal
import sys
from pathlib import Path

# What changes something on a disk, or waits for it.
BOUNDARIES = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "open")


def install(number: int | None, counter: Path | None, folder: str) -> None:
    count = 0
    for name in BOUNDARIES:
        real = getattr(os, name)

        def counted(*arguments, _real=real, _name=name, **options):
            nonlocal count
            if _concerns(_name, arguments, folder):
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                if counter is not None:
                    with counter.open("ab") as file:
                        file.write(b".")
            return _real(*arguments, **options)

        setattr(os, name, counted)


def _concerns(name: str, arguments: tuple, folder: str) -> bool:
    """Whether the operation is on a file of `folder`; opening only if the file is written."""
    first = arguments[0]
    if isinstance(first, int):
        first = os.readlink(f"/proc/self/fd/{first}")
    if name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR):
        return False
    return str(first).startswith(folder)


if __name__ == "__main__":
    which, folder = sys.argv[1:3]
    counter = os.environ.get("CRASHING_COUNT")
    install(None if which == "count" else int(which), None if counter is None else Path(counter), folder)
    from darknight.cli.app import run

    sys.exit(run(sys.argv[3:]))
