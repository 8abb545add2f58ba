"""The command `darknight`."""

import os
import sys

# Before torch is loaded, which reads it then: threads that wait for work leave the cores to workers of this machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    from darknight.cli.app import main
except KeyboardInterrupt:  # loading torch takes seconds, in which Ctrl-C should not show a traceback either
    sys.exit(130)

__all__ = ["main"]
