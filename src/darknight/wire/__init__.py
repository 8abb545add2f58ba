"""Messages and how they travel between the enclave and one worker. What they may be is in darknight.types.

A transport has two ends. The enclave's `Link` sends messages and waits for the reply to one of them; the worker's
`Seat` reads messages and writes replies. The transcript of a worker is taken in its seat, where it reads and writes.

In-process is the only transport so far: both ends are in one process.
"""

from darknight.wire.inprocess import in_process
from darknight.wire.link import Link, LinkClosed, LinkError, Misbehaved, Refused, Seat
from darknight.wire.transcript import Transcript

__all__ = ["Link", "LinkClosed", "LinkError", "Misbehaved", "Refused", "Seat", "Transcript", "in_process"]
