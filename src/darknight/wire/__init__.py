"""Messages and how they travel between the enclave and one worker. What they may be is in darknight.types.

A transport has two ends. The enclave's `Link` posts messages and asks tasks; the worker's `Seat` reads messages and
writes replies. The transcript of a worker is taken in its seat, where it reads and writes.

    grpc_link, grpc_seat    one gRPC stream under mutual TLS: tls, identity, handshake; codec, fields, readers, seat
    pipe                    frames between machines, sealed, over a TCP connection beside that stream
    shared_memory, mapped   tensors between processes of one machine, beside gRPC: doors, segments, arena, lending;
                            bell, switchboard; usual
    seeds                   shares that come as a key, and what a worker makes of them
    inprocess               both ends in one process
    recording               what a worker of this machine saw, for whoever started it
    hostile                 a worker that lies, for tests: plan, tampering, hearsay

The first two are imported from their files: whoever needs no gRPC does not load it.
"""

from darknight.wire.inprocess import in_process
from darknight.wire.link import Link, LinkClosed, LinkError, Misbehaved, Refused, Seat
from darknight.wire.transcript import Transcript

__all__ = ["Link", "LinkClosed", "LinkError", "Misbehaved", "Refused", "Seat", "Transcript", "in_process"]
