"""A hostile worker, built from the real one: a seat between it and the wire that lies as a plan says.

For tests, audits, and whoever wants to see what becomes of a lie. The executor behind the seat is the real one and is
right; what it answers is altered on its way out, or the weights on their way in. Plans are in darknight.wire.plan.

Guarantees: no program of ours makes such a seat unless the environment says DARKNIGHT_INSECURE_HOSTILE=1. Every lie is
    in the log ("lied": layer, call, pass, attack, and no value of a tensor) before the enclave hears it, and nothing
    that says the truth after all is called a lie. What the worker keeps, and memory that it shares, is never altered.
    Contract tests: tests/wire/test_hostile.py.
Assumes: that no data is real. Old answers and weights that a plan needs are kept beside the worker's memory limit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor

from darknight.errors import UsageError
from darknight.types import Answer, BackwardTask, Forget, ForwardTask, Message, Pass, Refusal, Reply, TooLarge, Weights
from darknight.wire.hearsay import Answers, Meeting, OldWeights
from darknight.wire.link import LinkClosed, Seat
from darknight.wire.plan import ON_WEIGHTS, Lie, Plan
from darknight.wire.tampering import Dice, different, tampered, weights_altered

__all__ = ["INSECURE_VARIABLE", "HostileSeat", "Plan", "require_insecure"]

INSECURE_VARIABLE = "DARKNIGHT_INSECURE_HOSTILE"

_WITH_WEIGHTS = frozenset({Pass.FORWARD, Pass.GRAD_INPUT})  # passes whose result depends on the weights
_BORROWED = frozenset({"another-call", "earlier-step", "another-worker"})
_DEEDS = frozenset({"mislabelled", "silent", "refuse", "hang-up", "slow"})  # they leave the numbers alone

_log = logging.getLogger("darknight.worker")


def require_insecure(environment: Mapping[str, str]) -> None:
    """Raises UsageError unless the environment says that lies are wanted."""
    if environment.get(INSECURE_VARIABLE) != "1":
        raise UsageError(
            "a hostile plan makes a worker that lies, for tests and audits, and never where data is real. If that is "
            f"what you want, set the environment variable {INSECURE_VARIABLE}=1."
        )


@dataclass(frozen=True)
class _Task:
    """What an answer will be about."""

    layer: str
    call: int
    version: int
    passes: frozenset[Pass]


class _Teller:
    """One attack of the plan, and how often its moment has come."""

    def __init__(self, lie: Lie) -> None:
        self.lie = lie
        self.told = 0
        self._matched = 0

    def concerns(self, layer: str) -> bool:
        return fnmatchcase(layer, self.lie.layers)

    def is_due(self) -> bool:
        """Called once for everything that matches."""
        self._matched += 1
        beyond = self._matched - self.lie.after
        enough = self.lie.count is not None and self.told >= self.lie.count
        return beyond > 0 and beyond % self.lie.every == 0 and not enough


class HostileSeat:
    """A seat that lies as `plan` says, from the beginning of a session to its end. Made when the session begins."""

    def __init__(self, seat: Seat, plan: Plan) -> None:
        self._seat = seat
        self._tellers = [_Teller(lie) for lie in plan.lies()]
        self._tasks: dict[int, _Task] = {}
        self._primes: dict[tuple[str, int], int | None] = {}
        self._bent: dict[tuple[str, int], str] = {}  # weights that the executor has in another form -> the attacks
        self._old_weights = OldWeights()
        self._by_call = Answers()
        self._by_version = Answers()
        self._meetings: dict[Path, Meeting] = {}
        self.lies = 0  # answers that were not what they should be, or did not come as they should

    # --- on the way in ----------------------------------------------------------------------------------------------
    def read(self) -> tuple[int, Message | TooLarge] | None:
        found = self._seat.read()
        if found is None:
            return None
        ticket, message = found
        match message:
            case Weights():
                return ticket, self._arrived(message)
            case ForwardTask():
                self._tasks[ticket] = _Task(message.layer, message.call, message.version, frozenset({Pass.FORWARD}))
            case BackwardTask():
                self._tasks[ticket] = _Task(message.layer, message.call, message.version, frozenset(message.passes))
            case Forget():
                for key in list(self._primes) if message.everything else message.weights:
                    self._primes.pop(key, None)
                    self._bent.pop(key, None)
        return found

    def _arrived(self, weights: Weights) -> Weights:
        key = weights.layer, weights.version
        self._primes[key] = weights.prime
        self._bent.pop(key, None)
        for teller in self._tellers:
            if teller.lie.attack not in ON_WEIGHTS or not teller.concerns(weights.layer):
                continue
            other = self._other_weights(weights, teller.lie)
            if teller.is_due() and other is not None:
                teller.told += 1
                weights = replace(weights, tensor=other)
                self._bent[key] = "+".join(filter(None, (self._bent.get(key), teller.lie.attack)))
        return weights

    def _other_weights(self, weights: Weights, lie: Lie) -> Tensor | None:
        if lie.attack == "stale-weights":
            old = self._old_weights
            return old.first(weights) if lie.back is None else old.before(weights, lie.back)
        dice = Dice(lie.seed, weights.layer, weights.version, list(weights.tensor.shape))
        return weights_altered(weights.tensor, weights.prime, dice, lie.size)

    # --- on the way out ---------------------------------------------------------------------------------------------
    def write(self, ticket: int, reply: Reply) -> None:
        task = self._tasks.pop(ticket, None)
        if task is None or not isinstance(reply, Answer):  # what it cannot do, it says truly
            self._seat.write(ticket, reply)
            return
        self._note(task, reply)
        bent, affected = self._bent.get((task.layer, task.version)), _WITH_WEIGHTS & reply.tensors.keys()
        if bent is not None and affected:
            self._lied(task, bent, affected)
        told: Reply | None = reply
        for teller in self._tellers:
            if isinstance(told, Answer) and teller.lie.attack not in ON_WEIGHTS and teller.concerns(task.layer):
                told = self._told(teller, task, told)
        if told is not None:
            self._seat.write(ticket, told)

    def _told(self, teller: _Teller, task: _Task, answer: Answer) -> Reply | None:
        """What one attack makes of an answer; None if nothing is to be sent."""
        lie = teller.lie
        deed = lie.attack in _DEEDS
        matching = lie.passes & (task.passes if deed else answer.tensors.keys())
        if not matching or not teller.is_due():
            return answer
        if deed:
            teller.told += 1
            self._lied(task, lie.attack, matching)
            return self._done(lie, answer)
        changed = {}
        for kind in matching:
            other = self._other_answer(lie, task, kind, answer.tensors[kind])
            if other is not None:
                changed[kind] = other
        if not changed:
            return answer
        teller.told += 1
        self._lied(task, lie.attack, changed.keys())
        return replace(answer, tensors={**answer.tensors, **changed})

    def _done(self, lie: Lie, answer: Answer) -> Reply | None:
        match lie.attack:
            case "slow":
                time.sleep(lie.seconds)
                return answer
            case "mislabelled":
                return replace(answer, call=answer.call + 1)
            case "refuse":
                return Refusal(message="this worker refuses, because its hostile plan says so")
            case "hang-up":
                self.close()
                raise LinkClosed("hung up, because the hostile plan says so")
        return None  # silent

    def _other_answer(self, lie: Lie, task: _Task, kind: Pass, tensor: Tensor) -> Tensor | None:
        key = task.layer, kind, tuple(tensor.shape), tensor.dtype
        match lie.attack:
            case "another-call":
                other = self._by_call.other(key, task.call)
            case "earlier-step":
                other = self._by_version.other(key, task.version)
            case "another-worker":
                other = self._meeting(lie).take(_subject(task, kind, tensor), tensor, lie.wait)
            case _:
                dice = Dice(lie.seed, task.layer, task.call, kind.value, list(tensor.shape))
                return tampered(tensor, self._primes.get((task.layer, task.version)), dice, lie)
        return None if other is None else different(tensor, other)

    def _note(self, task: _Task, answer: Answer) -> None:
        """Keeps a true answer for those who will tell it as another one: this worker later, or others now."""
        for lie in (teller.lie for teller in self._tellers if teller.concerns(task.layer)):
            for kind in lie.passes & answer.tensors.keys() if lie.attack in _BORROWED else ():
                tensor = answer.tensors[kind]
                key = task.layer, kind, tuple(tensor.shape), tensor.dtype
                match lie.attack:
                    case "another-call":
                        self._by_call.keep(key, task.call, tensor)
                    case "earlier-step":
                        self._by_version.keep(key, task.version, tensor)
                    case "another-worker":
                        self._meeting(lie).put(_subject(task, kind, tensor), tensor)

    def _meeting(self, lie: Lie) -> Meeting:
        assert lie.meet is not None  # the plan was checked
        if lie.meet not in self._meetings:
            self._meetings[lie.meet] = Meeting(lie.meet)
        return self._meetings[lie.meet]

    def _lied(self, task: _Task, attack: str, passes: Collection[Pass]) -> None:
        self.lies += 1
        names = "+".join(kind.value for kind in Pass if kind in passes)
        fields = {"layer": task.layer, "call": task.call, "pass": names, "attack": attack}
        _log.info("lied", extra={"fields": fields})

    def close(self) -> None:
        for meeting in self._meetings.values():
            meeting.leave()
        self._seat.close()


def _subject(task: _Task, kind: Pass, tensor: Tensor) -> str:
    about = [task.layer, task.call, task.version, kind.value, list(tensor.shape)]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
