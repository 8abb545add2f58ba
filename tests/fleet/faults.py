"""Workers that fail on purpose: the real executor and loop, with a seat that misbehaves at chosen replies."""

import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace

from darknight.coding import PRIME_28
from darknight.fleet import Fleet, Member
from darknight.types import BackwardTask, Forget, ForwardTask, Refusal
from darknight.wire import LinkClosed, LinkError, in_process
from darknight.wire.seeds import share_of
from darknight.worker import Executor, serve


@dataclass
class Plan:
    """What a worker does instead of its nth reply, counted from one over its whole life: `{3: "die"}`.

    die         closes the link; nobody answers when it is dialled again, until `reborn` is set
    restart     closes the link, and can be dialled at once, with an empty memory
    hang        never answers this one; the ones after it neither, until `woken` is set, then all of them
    twice       answers twice
    other       answers a question that nobody asked
    refuse      says that it cannot
    lie         adds one to the first element of its answer, modulo the prime
    skip        says nothing to this one
    """

    replies: dict[int, str] = field(default_factory=dict)
    reborn: threading.Event = field(default_factory=threading.Event)
    woken: threading.Event = field(default_factory=threading.Event)
    count: int = 0
    dead: bool = False
    seen: list = field(default_factory=list)  # every task that reached the worker
    forgot: list = field(default_factory=list)  # every call that it was told to forget
    seats: list = field(default_factory=list)  # its end of every link


class FaultySeat:
    def __init__(self, seat, plan):
        self._seat, self._plan = seat, plan

    def read(self):
        found = self._seat.read()
        if found is not None and isinstance(found[1], ForwardTask | BackwardTask):
            self._plan.seen.append(replace(found[1], tensor=share_of(found[1])))
        if found is not None and isinstance(found[1], Forget):
            self._plan.forgot += found[1].calls
        return found

    def write(self, ticket, reply):
        plan = self._plan
        plan.count += 1
        match plan.replies.get(plan.count):
            case "die" | "restart" as how:
                plan.dead = how == "die"
                self._seat.close()
            case "hang":
                plan.woken.wait(60)
                self._seat.write(ticket, reply)
            case "twice":
                self._seat.write(ticket, reply)
                self._seat.write(ticket, reply)
            case "other":
                self._seat.write(ticket + 1000, reply)
            case "skip":
                pass
            case "refuse":
                self._seat.write(ticket, Refusal(message="no room"))
            case "lie":
                for tensor in reply.tensors.values():
                    tensor.view(-1)[0] = (tensor.view(-1)[0] + 1) % PRIME_28
                self._seat.write(ticket, reply)
            case _:
                self._seat.write(ticket, reply)

    def close(self):
        self._seat.close()


def redial(fleet):
    """Dials every worker that is gone, now."""
    for line in fleet._lines:
        with suppress(LinkError):
            line.dial(now=True)


def faulty_fleet(operators, plans, **options):
    """One thread worker for each operator; `plans` by worker."""

    def member(number, operator):
        plan = plans.setdefault(number, Plan())

        def dial():
            if plan.dead and not plan.reborn.is_set():
                raise LinkClosed("nothing listens there")
            link, seat = in_process()
            plan.seats.append(seat)
            threading.Thread(target=serve, args=(FaultySeat(seat, plan), Executor()), daemon=True).start()
            return link

        return Member(f"w{number}", operator, dial)

    return Fleet([member(j, operator) for j, operator in enumerate(operators)], **options)
