"""Which parts of shared memory a worker may still touch, and when they are the enclave's again.

A worker reads a share, and writes its answer, at a time of its own choosing, even if nobody wants the answer any more.
So a block is used again only when the worker cannot need it:

    an answer's blocks, and a share that is not kept    when the task was answered
    an answer's blocks, if it is read in place          when it was answered and released, or nobody has it any more
    a share that is kept, and weights                   when they were forgotten and every task before that is answered

A share may be made where its worker reads it (`room`). The worker can look there at once; but nothing tells it to, and
nothing that it does counts before the share is asked with.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from darknight.types import Answer, Expected, Forget, ForwardTask, Pass, Task, Weights
from darknight.wire.shared_memory import Block, Memory
from darknight.wire.usual import places

_MARK = "darknight_room"  # on the very tensor


def is_room(tensor: Tensor) -> bool:
    """Whether it is some worker's to read and write: then it is never read here."""
    return hasattr(tensor, _MARK)


@dataclass(eq=False, slots=True)
class Loan:
    """The blocks of one task. call: under which the worker keeps the share; None if it does not.

    share: None if the worker makes it from a seed. lent: the answer is read in place, as these tensors; None if it is
    copied.
    """

    share: Block | None
    answers: dict[Pass, Block]
    call: int | None
    lent: dict[Pass, Tensor] | None = None

    def places(self) -> bytes:
        """What the worker is told of them, as a part of the task's frame."""
        return places(self.share, self.answers)

    @property
    def blocks(self) -> list[Block]:
        return [*([] if self.share is None else [self.share]), *self.answers.values()]


@dataclass
class _Forgotten:
    """What a worker was told to forget under this ticket."""

    ticket: int
    message: Forget
    blocks: list[Block] = field(default_factory=list)
    weights: set[tuple[str, int]] = field(default_factory=set)


class Lending:
    """The blocks of one link. Every method may be called from any thread."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._tasks: dict[int, Loan] = {}  # by ticket
        self._kept: dict[int, tuple[int, Block]] = {}  # by call: the ticket of the task, and its share
        self._weights: set[tuple[str, int]] = set()
        self._forgotten: list[_Forgotten] = []
        # By ticket and pass: what is read in place, and who notices that nobody does any more.
        self._read: dict[tuple[int, Pass], tuple[Block, weakref.ref[Tensor]]] = {}
        self._released: deque[tuple[int, Pass]] = deque()  # and is so no more; finalizers write it down, and no more
        self._rooms: dict[int, tuple[Block, weakref.ref[Tensor]]] = {}  # by address, until they are asked with
        self._left: deque[int] = deque()  # addresses of rooms that nobody has any more

    def lend_weights(self, message: Weights) -> bytes:
        """Where the worker finds the weights. They may have been forgotten before, and be needed again."""
        key = message.layer, message.version
        with self._lock:
            for forgotten in self._forgotten:
                forgotten.weights.discard(key)
            self._weights.add(key)
            return places(self._memory.put_weights(message))

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Memory for the share of a task that `lend` will find there."""
        if not prod(shape):
            return None
        self._tidy()
        block, tensor = self._memory.show(shape, dtype, keep=True)  # who masks writes, also if the link ends meanwhile
        try:
            address, left = tensor.data_ptr(), self._left
            setattr(tensor, _MARK, True)
            with self._lock:
                self._rooms[address] = block, weakref.ref(tensor, lambda _: left.append(address))
        except BaseException:
            self._memory.free(block)
            raise
        return tensor

    def has_room(self, tensor: Tensor) -> bool:
        """Whether `lend` will find the share there."""
        return tensor.data_ptr() in self._rooms

    def _tidy(self) -> None:
        if self._released or self._left:
            with self._lock:
                self._take_back()

    def _share(self, tensor: Tensor) -> Block:
        """Where the share is: in its room, or written now."""
        with self._lock:
            address = tensor.data_ptr()
            block, reference = self._rooms.get(address, (None, None))
            if block is not None and reference is not None and reference() is tensor:
                del self._rooms[address]  # and with it who would notice that nobody has the tensor any more
                self._memory.let_go(block)
                return block
        return self._memory.put(tensor)

    def lend(self, task: Task, expected: Expected) -> Loan:
        """Writes the share of a task, if it is not there already, and takes places for its answer."""
        self._tidy()
        share: Block | None = None
        answers: dict[Pass, Block] = {}
        lent: dict[Pass, Tensor] | None = {} if expected.lent else None
        try:
            share = self._share(task.tensor) if task.seed is None else None
            for kind, shape in expected.shapes.items():
                if lent is None:
                    answers[kind] = self._memory.reserve(prod(shape) * expected.dtype.itemsize)
                else:
                    answers[kind], lent[kind] = self._memory.show(shape, expected.dtype, keep=False)
        except BaseException:
            self._memory.free(*Loan(share, answers, None).blocks)
            raise
        call = task.call if isinstance(task, ForwardTask) and task.keep else None
        return Loan(share, answers, call, lent)

    def collect(self, loan: Loan, expected: Expected) -> dict[Pass, Tensor]:
        """Copies of the answer, as it is at this moment; or the answer itself, if it is to be read in place."""
        if loan.lent is not None:
            return loan.lent
        forms, dtype = expected.shapes, expected.dtype
        return {kind: self._memory.take(block, forms[kind], dtype) for kind, block in loan.answers.items()}

    def asked(self, ticket: int, loan: Loan) -> None:
        """The task is on its way under this ticket."""
        with self._lock:
            self._tasks[ticket] = loan

    def withdrawn(self, ticket: int, loan: Loan, oldest: int) -> None:
        """The task was not sent, and will not be: the worker never knew of these blocks."""
        with self._lock:
            self._tasks.pop(ticket, None)
            self._memory.free(*loan.blocks)
            self._settle(oldest)

    def forgets(self, ticket: int, message: Forget, oldest: int) -> None:
        """The message is on its way; `oldest`: the ticket of the oldest task without an answer."""
        forgotten = _Forgotten(ticket, message)
        with self._lock:
            calls = list(self._kept) if message.everything else message.calls
            forgotten.blocks += [self._kept.pop(call)[1] for call in calls if call in self._kept]
            forgotten.weights |= self._weights if message.everything else self._weights.intersection(message.weights)
            self._weights -= forgotten.weights
            self._forgotten.append(forgotten)
            self._settle(oldest)

    def _noting(self, place: tuple[int, Pass]) -> Callable[[object], None]:
        """For an answer that comes too late, or whose reader is interrupted.

        It takes no lock: the collector calls it in any thread and under any lock.
        """
        released = self._released
        return lambda _: released.append(place)

    def _release(self, places: list[tuple[int, Pass]]) -> None:
        self._released.extend(places)
        with self._lock:
            self._take_back()

    def _take_back(self) -> None:
        """What was released may be used again. Twice is no error: each place has its entry once."""
        found: list[tuple[Block, weakref.ref[Tensor]] | None] = []
        while self._released:
            found.append(self._read.pop(self._released.popleft(), None))
        while self._left:
            found.append(self._rooms.pop(self._left.popleft(), None))
        self._memory.free(*[each[0] for each in found if each is not None])

    def answered(self, ticket: int, oldest: int, answer: Answer | None = None) -> Answer | None:
        """The worker has answered, whatever it said. answer: if somebody gets one; with a way to release it, if it is
        lent.
        """
        release = self.taken(ticket, oldest, {} if answer is None else answer.tensors)
        return None if answer is None else replace(answer, release=release)

    def taken(self, ticket: int, oldest: int, tensors: Mapping[Pass, Tensor]) -> Callable[[], None]:
        """The same. tensors: of the answer, if somebody gets one. Returns how they are released, as far as they are
        lent.
        """
        places: list[tuple[int, Pass]] = []
        release = partial(self._release, places)
        with self._lock:
            loan = self._tasks.pop(ticket, None)
            if loan is None:
                return release
            for kind, block in loan.answers.items():
                tensor = tensors.get(kind) if loan.lent is not None else None
                if tensor is None:
                    self._memory.free(block)
                else:
                    place = ticket, kind
                    reader = weakref.ref(tensor, self._noting(place))
                    self._memory.keep(block, reader)
                    self._read[place] = block, reader
                    places.append(place)
            self._put_back(ticket, loan)
            self._settle(oldest)
        return release

    def _put_back(self, ticket: int, loan: Loan) -> None:
        """The share of a task that was answered."""
        if loan.share is None:
            return
        if loan.call is None:
            self._memory.free(loan.share)
            return
        for forgotten in self._forgotten:  # it was forgotten before it was answered, and another task may still use it
            message = forgotten.message
            if forgotten.ticket > ticket and (message.everything or loan.call in message.calls):
                forgotten.blocks.append(loan.share)
                return
        kept = ticket, loan.share
        if loan.call in self._kept:  # the worker keeps one share for a call: the last that was sent
            (_, older), kept = sorted((kept, self._kept[loan.call]), key=lambda entry: entry[0])
            self._forgotten.append(_Forgotten(kept[0], Forget(), [older]))
        self._kept[loan.call] = kept

    def _settle(self, oldest: int) -> None:
        if not self._forgotten:
            return
        done = [forgotten for forgotten in self._forgotten if forgotten.ticket < oldest]
        self._forgotten = [forgotten for forgotten in self._forgotten if forgotten.ticket >= oldest]
        for forgotten in done:
            self._memory.free(*forgotten.blocks)
            for layer, version in forgotten.weights:
                self._memory.forget_weights(layer, version)

    def close(self) -> None:
        """Everything at once, but what is read in place when it is so no more; the worker's connection must be gone
        for good.
        """
        with self._lock:
            self._tasks.clear()  # views of answers that will not come: memory is mapped as long as there is one
        self._memory.close()
