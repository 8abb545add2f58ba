"""Fleets whose workers are threads of the test: the real executor and loop behind the in-process transport.

Separate processes take seconds to start; what does not depend on them is tested with these.
"""

import threading

from darknight.fleet import Fleet, Member
from darknight.wire import Transcript, in_process
from darknight.worker import Executor, serve

_turn = threading.Lock()  # torch uses every core for each worker, so they compute in turn


def thread_member(number, transcript=None, operator=None):
    def dial():
        link, seat = in_process(transcript)
        name = f"darknight-worker-{number}"
        threading.Thread(target=serve, args=(seat, Executor(turn=_turn)), name=name, daemon=True).start()
        return link

    return Member(f"thread-{number}", operator or f"simulated-{number}", dial)


def thread_fleet(scheme, *, record=False, workers=None, operators=None, **options):
    """Like dk.local_fleet, without its processes."""
    count = workers or scheme.workers
    transcripts = [Transcript() for _ in range(count)] if record else None
    members = [
        thread_member(j, transcripts[j] if record else None, operators[j] if operators else None) for j in range(count)
    ]
    return Fleet(members, recordings=transcripts, **options)
