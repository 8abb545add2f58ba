"""The worker's end of one stream: frames in, messages out; replies in, frames out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue

from torch import Tensor

from darknight.errors import OpError
from darknight.types import Answer, Message, Pass, Refusal, Reply, TooLarge
from darknight.wire import codec, usual
from darknight.wire.codec import BadFrame, Form
from darknight.wire.mapped import Mapped
from darknight.wire.pipe import Frame, Pipe, PipeBroken
from darknight.wire.readers import MessageReader, Place, raw

_FAREWELL = 30.0  # seconds for an enclave to take what came through the pipe last


class GrpcSeat:
    """A `wire.Seat`. One thread reads and writes (the session's), one sends (`frames`), any may end it.

    frames: what comes, an iterator that ends or raises when the stream does. mapped: makes the worker's half of the
    shared memory, over whose door frames come and go then; or is None. pipe: its end of a pipe, through which they do,
    or None.
    """

    def __init__(
        self,
        frames: Iterator[bytes],
        admit: Callable[[int], None],
        mapped: Callable[[], Mapped] | None = None,
        pipe: Callable[[], Pipe] | None = None,
    ) -> None:
        self._incoming = frames
        self._reader = MessageReader(admit, at=None if mapped is None else self._at)
        self._open_mapped = mapped
        self._mapped: Mapped | None = None
        self._open_pipe = pipe
        self._pipe: Pipe | None = None
        self._due: dict[int, Mapping[Pass, Place] | None] = {}  # tasks that were read, and where their answers go
        self._outbox = _Outbox()
        self._lock = threading.Lock()
        self._waiting = False
        self._draining = False
        self._over = False
        self.complaint = ""  # what was wrong with what the enclave sent

    # --- the session's side -----------------------------------------------------------------------------------------
    def read(self) -> tuple[int, Message | TooLarge] | None:
        while True:
            try:
                frame = self._next_frame()
                if frame is None:
                    return None
                found = self._reader.feed(frame)
            except BadFrame as error:
                self.complaint = str(error)
                self._outbox.end()
                return None
            if found is not None:
                if found.is_task:
                    self._due[found.ticket] = found.answers
                return found.ticket, found.message

    def _next_frame(self) -> Frame | None:
        with self._lock:
            if self._draining or self._outbox.ended:
                return None
            self._waiting = True
        try:
            if (pipe := self._piped()) is None:
                return self._from_stream_or_door()
            with suppress(PipeBroken):  # the enclave hears of it at its own end
                return pipe.receive(self._reader.place())
            return None
        finally:
            with self._lock:
                self._waiting = False

    def _from_stream_or_door(self) -> bytes | None:
        try:
            return next(self._incoming, None) if self._open_mapped is None else self._segments().next_frame()
        except BadFrame:
            raise
        except Exception:  # gRPC raises a bare Exception when the stream is cancelled
            return None

    def write(self, ticket: int, reply: Reply) -> None:
        """Returns when the reply before this one has been sent, or the stream is over.

        A reply to what is no task, as a refusal of weights, goes nowhere: the task that needs them gets its own.
        """
        if ticket not in self._due:
            return
        places = self._due.pop(ticket)
        try:
            header = self._header(ticket, reply)
            tensors: list[Tensor] = []
            if isinstance(reply, Answer):
                if places is None:
                    tensors = list(reply.tensors.values())
                else:
                    self._write_out(reply, places)
        except (BadFrame, OpError) as error:
            reply = Refusal(message=f"the result cannot be sent: {error}")
            header, tensors = self._header(ticket, reply), []
        if self._mapped is None:
            self._outbox.put(header, tensors)
        else:
            self._mapped.send(header)

    @staticmethod
    def _header(ticket: int, reply: Reply) -> bytes:
        if isinstance(reply, Answer):
            return usual.answer_frame(reply, ticket)
        return codec.pack({**codec.reply_header(reply), "ticket": ticket})

    def close(self) -> None:
        """The session is done. Replies that were written are still sent."""
        self._outbox.finish()
        if self._mapped is not None:
            self._mapped.close()

    # --- the stream's side ------------------------------------------------------------------------------------------
    def frames(self) -> Iterator[bytes]:
        """What is to be sent, until the seat ends; with a pipe it goes there, from whoever iterates this."""
        with suppress(PipeBroken):  # who reads hears it too
            for frames in self._outbox.messages():
                if self._pipe is None:
                    yield from map(bytes, frames)
                else:
                    self._pipe.send(frames)
                del frames  # while it waits for the next it keeps nothing alive
        if self._pipe is not None:
            self._pipe.finish(_FAREWELL)

    def drain(self) -> None:
        """No further message is read; what is being computed is still answered."""
        with self._lock:
            self._draining = True
            idle = self._waiting
        if idle:
            self._outbox.finish()

    def end(self) -> None:
        """The stream is gone."""
        self._outbox.end()
        if self._mapped is not None:
            self._mapped.hang_up()
        with self._lock:
            self._over = True
        if self._pipe is not None:
            self._pipe.close()

    def _piped(self) -> Pipe | None:
        opened, self._open_pipe = self._open_pipe, None  # what its keys are made of is not needed any more
        if opened is not None:
            pipe = opened()
            with self._lock:
                self._pipe = pipe
            if self._over:  # while the enclave was waited for
                pipe.close()
        return self._pipe

    # --- shared memory ----------------------------------------------------------------------------------------------
    def _at(self, place: Place, form: Form) -> Tensor:
        return self._segments().tensor(place, form[0], form[1], writable=False)

    def _write_out(self, answer: Answer, places: Mapping[Pass, Place]) -> None:
        if answer.tensors.keys() != places.keys():
            raise BadFrame("other passes than the enclave made room for")
        for kind, tensor in answer.tensors.items():
            target = self._segments().tensor(places[kind], tensor.dtype, tuple(tensor.shape), writable=True)
            target.copy_(tensor)

    def _segments(self) -> Mapped:
        if self._mapped is None and self._open_mapped is not None:
            self._mapped = self._open_mapped()
        if self._mapped is None:
            raise BadFrame("a place in shared memory, on a link that has none")
        return self._mapped


class _Outbox:
    """At most one reply waits while another is being sent: whoever does not read answers gets no further ones."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[bytes, list[Tensor]] | None] = SimpleQueue()
        self._room = threading.Semaphore(1)
        self.ended = False

    def put(self, header: bytes, tensors: list[Tensor]) -> None:
        self._room.acquire()
        if self.ended:
            self._room.release()  # for whoever comes next
        else:
            self._queue.put((header, tensors))

    def finish(self) -> None:
        """After what is in it, nothing more."""
        self._queue.put(None)

    def end(self) -> None:
        """Nothing more, at once."""
        self.ended = True
        self._queue.put(None)
        self._room.release()

    def messages(self) -> Iterator[Iterator[Frame]]:
        """The frames of each reply, one after the other."""
        while (item := self._queue.get()) is not None and not self.ended:
            yield _frames_of(*item)
            del item  # while it waits for the next it keeps nothing alive
            self._room.release()


def _frames_of(header: bytes, tensors: list[Tensor]) -> Iterator[Frame]:
    yield header
    for tensor in tensors:
        memory = raw(tensor)
        for begin, end in codec.chunks_of(len(memory)):
            yield memory[begin:end]
