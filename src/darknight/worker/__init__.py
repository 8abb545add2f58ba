"""The untrusted program: it multiplies shares with public weights, and knows nothing else.

This room imports ops and wire and never a trusted room, so it installs and runs alone.
"""

import os

# Before torch is loaded, which reads it then. Threads that spin while they wait slow down every other worker of the
# machine: three workers with two threads each on two cores are seven times faster like this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from darknight.worker.executor import Executor
from darknight.worker.serve import serve

__all__ = ["Executor", "serve"]
