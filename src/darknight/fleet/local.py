"""Workers on this machine, for trying things out: a simulation of separate operators."""

from __future__ import annotations

import threading
import weakref

from darknight.coding.scheme import Scheme
from darknight.errors import FleetError
from darknight.fleet.fleet import Fleet
from darknight.wire import Transcript, in_process
from darknight.worker import Executor, serve


def local_fleet(scheme: Scheme, *, record: bool = False) -> Fleet:
    """As many workers as `scheme` needs, as threads of this process: docs/adr/0005.

    record: keep what each worker received and sent, for `fleet.transcript(j)`. It grows with every call.

    Assumes: that you only try things out. All shares are in one hand here, and with all shares nothing is hidden.
    """
    if not isinstance(scheme, Scheme):
        raise FleetError(f"a {type(scheme).__name__} where a scheme belongs. Use dk.Scheme(inputs=4, colluders=1).")
    turn = threading.Lock()  # torch uses every core for each worker, so they compute in turn
    links, threads = [], []
    transcripts = [Transcript() for _ in range(scheme.workers)] if record else None
    for number in range(scheme.workers):
        link, seat = in_process(transcripts[number] if transcripts else None)
        thread = threading.Thread(
            target=serve, args=(seat, Executor(turn)), name=f"darknight-worker-{number}", daemon=True
        )
        thread.start()
        links.append(link)
        threads.append(thread)

    def stop() -> None:
        for link in links:
            link.close()
        for thread in threads:
            thread.join(timeout=60)

    fleet = Fleet(links, operators=[f"simulated-{j}" for j in range(scheme.workers)], transcripts=transcripts)
    # A fleet that is closed, or dropped, or still there when the program ends, takes its workers with it.
    fleet.on_close(weakref.finalize(fleet, stop))
    return fleet
