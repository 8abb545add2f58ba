"""The enclave's end of a link to a worker: one gRPC stream under mutual TLS.

The stream is for the greeting and the end. Between them frames go through a sealed pipe (`wire.pipe`). Threads: one
takes what is to be sent from a queue, one takes what comes and resolves futures. Whoever posts or asks only adds to the
queue, so a worker that stalls holds up nobody but itself. Where no pipe can be had, gRPC takes the place of both.

With shared memory frames go over the door of that memory, at once and from whoever posts or asks; what comes there is
taken by whoever waits for answers (`wire.switchboard`).

Guarantees: the worker holds the private key of the certificate that was given, and nobody between sees or changes a
    frame (TLS 1.3: our workers speak nothing older, and one that does weakens its own link only; AES-256-GCM in the
    pipe; with shared memory, nobody but this machine's kernel, which sees the tensors too). The answer to a task
    has the expected form and comes after the task was sent, or the link is broken with words. So a worker that reads
    nothing cannot pass for one that works, by guessing tickets, while what was meant for it piles up here (contract
    test: tests/wire/test_rogue_worker.py).
Assumes: a tensor that was posted or asked with is not changed before it was sent.
Leaks: sizes and times of messages, and that this is DarKnight (the server name in the first packet), to everybody on
    the way; everything that is sent, to the worker.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from darknight.errors import OpError
from darknight.types import Answer, Expected, Forget, Refusal, Reply, Task, Weights
from darknight.wire import codec, handshake
from darknight.wire import pipe as pipes
from darknight.wire.bell import OVER, Bell
from darknight.wire.codec import BadFrame
from darknight.wire.doors import knock
from darknight.wire.fields import printable
from darknight.wire.handshake import Welcome
from darknight.wire.identity import WORKER, Identity, fingerprint
from darknight.wire.lending import Lending, Loan, is_room
from darknight.wire.link import LinkClosed, LinkError, Misbehaved, Refused
from darknight.wire.outbox import Outbox, Parcel
from darknight.wire.pipe import Agreement, Frame, Pipe, PipeBroken, new_secret
from darknight.wire.readers import Question, ReplyReader
from darknight.wire.shared_memory import Host, Memory
from darknight.wire.switchboard import Awaited, Switchboard
from darknight.wire.tls import CLIENT_OPTIONS, METHOD, SERVICE, client_credentials, grpc
from darknight.wire.usual import answer_around, posted_frame, task_frame, ticket_of, ticketed

_log = logging.getLogger("darknight.fleet")

_INTERRUPTED = "it was interrupted while it took an answer"
_LAST_WORDS = 0.5  # seconds to hear what a worker said before it ended, or why
_PIPE = 5.0  # seconds for a worker to open its pipe
_GRACE = 2.0  # seconds for the reader to notice that its stream was cancelled; it needs milliseconds


def connect(
    address: str,
    *,
    certificate: bytes,
    identity: Identity,
    host: Host | None = None,
    shared_memory: str | None = None,
    pipe: bool = True,
    timeout: float = 10.0,
) -> GrpcLink:
    """A link to the worker at `address` ("host:port") that holds the key of `certificate` (PEM).

    With `host` and `shared_memory` (the name of the worker's Unix socket) tensors go through shared memory; otherwise
    through a pipe, or gRPC where that is not wanted or cannot be had. timeout: seconds for an attempt; there is another
    where the first shows that the worker is older, or that no way leads to its pipe.
    Raises LinkClosed if there is no such worker or it refuses, and Misbehaved if what answers is none.
    """
    dial = partial(_connected, address, certificate, identity, host, shared_memory, timeout)
    protocol = handshake.PROTOCOL
    try:
        return dial(protocol, pipe)
    except _Outdated as error:  # it takes no seeds, or has no pipes, and does everything else
        protocol = error.protocol
    except _NoPipe as error:
        _log.warning(
            "%s: frames go through gRPC, which costs the enclave more than twice as much. Let that port through, or "
            "give the worker another with --pipe-port.",
            error,
        )
        pipe = False
    return dial(protocol, pipe)


class _NoPipe(LinkClosed):
    """The worker has a pipe, and nobody opened it. The words name its address."""


class _Outdated(LinkClosed):
    """The worker speaks an older protocol, which this enclave speaks too."""

    def __init__(self, words: str, protocol: int) -> None:
        super().__init__(words, protocol)
        self.protocol = protocol

    def __str__(self) -> str:
        return str(self.args[0])


def _connected(
    address: str,
    certificate: bytes,
    identity: Identity,
    host: Host | None,
    shared_memory: str | None,
    timeout: float,
    protocol: int,
    pipe: bool,
) -> GrpcLink:
    deadline = time.monotonic() + timeout
    door = handshake.new_token() if host is not None and shared_memory is not None else None
    secret = new_secret() if pipe and door is None else None
    stream = _Stream(address, certificate, identity, handshake.hello(door, protocol, secret), protocol)
    try:
        welcome = stream.welcomed(timeout)
        if door is not None and host is not None and shared_memory is not None:
            if welcome.door is None:
                raise LinkClosed(f"the worker at {address} has no shared memory; start it with --shared-memory")
            stream.lend(Memory(host, knock(shared_memory, door, welcome.door, _left(deadline))))
        elif secret is not None and welcome.pipe is not None:
            stream.lay(_opened(address, secret, welcome.pipe, min(_PIPE, _left(deadline))))
        stream.settle()
        return GrpcLink(stream, replace(welcome, pipe=None))  # what its keys were made of is not needed any more
    except BaseException:
        stream.close()
        raise


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _opened(address: str, secret: bytes, theirs: handshake.Waiting, timeout: float) -> Pipe:
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return pipes.dial(host, theirs.port, Agreement.of(secret, theirs.secret), timeout)
    except PipeBroken as error:
        raise _NoPipe(str(error)) from None


class GrpcLink:
    """A `wire.Link`. Dropping the last reference closes it, as does the end of the program."""

    def __init__(self, stream: _Stream, welcome: Welcome) -> None:
        self._stream = stream
        self.welcome = welcome
        self._finalizer = weakref.finalize(self, stream.abandon)  # threads hold the stream, and nobody holds the link
        self._finalizer.atexit = False  # `_close_all` does that

    @property
    def failure(self) -> LinkError | None:
        return self._stream.failure

    def post(self, message: Weights | Forget) -> None:
        for part in codec.parts_of(message) if isinstance(message, Forget) else (message,):
            self._stream.post(part)

    @property
    def has_pipe(self) -> bool:
        """Whether frames go through a sealed pipe."""
        return self._stream.has_pipe

    @property
    def takes_seeds(self) -> bool:
        return self.welcome.protocol >= handshake.SEEDS

    @property
    def shares_memory(self) -> bool:
        return self._stream.shares_memory

    def ask(self, task: Task, expected: Expected) -> Future[Answer]:
        if task.seed is not None and not self.takes_seeds:
            task = replace(task, seed=None)
        question = Question(task.layer, task.call, expected, self._stream.future())
        self._stream.ask(task, question)
        return question.future

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return self._stream.room(shape, dtype)

    def close(self) -> None:
        self._finalizer.detach()
        self._stream.close()


class _Stream:
    """The stream, its threads, and the questions that are open."""

    def __init__(self, address: str, certificate: bytes, identity: Identity, hello: bytes, protocol: int) -> None:
        self._address = address
        self._protocol = protocol
        self._certificate = certificate
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._tickets = 0
        self._open: dict[int, Question] = {}
        self._lending: Lending | None = None
        self._board: Switchboard | None = None
        self._pipe: Pipe | None = None
        self._silent = threading.Event()  # everything that the worker said at the door was heard
        self._settled = threading.Event()  # whether there is shared memory, or a pipe
        self._ended = threading.Event()  # the stream has, as gRPC says
        self._over = threading.Event()  # and what it said was heard
        self.failure: LinkError | None = None
        self._outbox = Outbox()
        self._welcome: Future[Welcome] = Future()
        self._channel: Any = grpc.secure_channel(
            f"dns:///{address}", client_credentials(identity, certificate), CLIENT_OPTIONS
        )
        method = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")  # no serializers: bytes both ways
        self._call: Any = method(self._outbox.frames(hello))
        self._reader = threading.Thread(target=self._read, name=f"darknight-link-{address}", daemon=True)
        _ALIVE.add(self)
        self._reader.start()

    def welcomed(self, timeout: float) -> Welcome:
        try:
            return self._welcome.result(timeout)
        except TimeoutError:
            raise LinkClosed(f"the worker at {self._address} did not answer within {timeout:g} s") from None

    def lend(self, memory: Memory) -> None:
        """From now on tensors go through shared memory, which ends with the stream."""
        with self._lock:
            if self.failure is None:
                self._lending = Lending(memory)
                self._outbox.ring_with(memory.ring)
                self._board, bell = memory.board, memory.listen()
                self._board.listen(bell, partial(self._hear, bell, ReplyReader(self._find)))
                return
        memory.close()
        raise _again(self.failure)

    def lay(self, pipe: Pipe) -> None:
        """From now on frames go through the pipe, which ends with the stream."""
        with self._lock:
            if self.failure is None:
                self._pipe = pipe
                name, messages = f"darknight-pipe-{self._address}", self._outbox.detour()
                threading.Thread(target=self._send, args=(pipe, messages), name=name, daemon=True).start()
                return
        pipe.close()
        raise _again(self.failure)

    @property
    def has_pipe(self) -> bool:
        return self._pipe is not None

    @property
    def shares_memory(self) -> bool:
        return self._lending is not None

    def settle(self) -> None:
        """How frames go is settled."""
        self._settled.set()

    def future(self) -> Future[Answer]:
        """Of an answer over this link."""
        return Future() if self._board is None else Awaited(self._board)

    # --- sending ----------------------------------------------------------------------------------------------------
    def post(self, message: Weights | Forget) -> None:
        self._check()
        try:
            frame, where = posted_frame(message), None
            if isinstance(message, Weights) and self._lending is not None:
                where = self._lending.lend_weights(message)
            with self._lock:
                parcel = self._parcel(frame, where, message.tensor if isinstance(message, Weights) else None)
                self._outbox.put(parcel)
                if isinstance(message, Forget) and self._lending is not None:
                    self._lending.forgets(parcel.ticket, message, self._oldest())
        except (LinkError, BadFrame) as error:
            self._explain(error)
            raise

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        self._check()
        if self._lending is None:
            return None
        try:
            return self._lending.room(shape, dtype)
        except LinkError as error:
            self._explain(error)
            raise

    def ask(self, task: Task, question: Question) -> None:
        self._check()
        lending = self._lending
        if is_room(task.tensor) and (lending is None or not lending.has_room(task.tensor)):
            raise LinkClosed("it began again while its share was made")  # for the link before this one, which lives on
        loan = parcel = where = None
        try:
            frame = task_frame(task)  # what does not fit fails before a place is taken for it
            if lending is not None:
                loan = lending.lend(task, question.expected)
                question.collect = partial(lending.collect, loan, question.expected)
                where = loan.places()
            with self._lock:
                parcel = self._parcel(frame, where, task.tensor if task.seed is None else None)
                self._open[parcel.ticket] = question  # before it is sent: the answer may come at any moment then
                # What can be made now is: later it costs more, when others have had the processor.
                question.usual = answer_around(task.layer, task.call, question.expected, parcel.ticket)
                if lending is not None and loan is not None:
                    lending.asked(parcel.ticket, loan)
                self._outbox.put(parcel)
        except BaseException as error:  # Ctrl-C too, at any point
            try:
                self._explain(error)
            finally:
                self._take_back(parcel, loan)
            raise

    def _send(self, pipe: Pipe, messages: Iterator[Iterator[Frame]]) -> None:
        try:
            with suppress(PipeBroken):  # who receives hears it too, and then why
                for frames in messages:
                    pipe.send(frames)
        finally:  # whatever it was: nothing would be sent any more, and everybody would wait
            pipe.hang_up()

    def _explain(self, error: BaseException) -> None:
        """What sending raised means: for the link, and for whoever sends."""
        if isinstance(error, LinkError):  # of the shared memory, or of what waits to be sent
            self._break_off(error)
        elif isinstance(error, BadFrame):
            raise OpError(f"this message does not fit the wire: {error}.") from None

    def _parcel(self, frame: bytes, where: bytes | None, tensor: Tensor | None) -> Parcel:
        """where: in shared memory, from where the worker takes the tensor; None if it follows the frame."""
        if self.failure is not None:
            raise _again(self.failure)
        if self._outbox.full:
            raise LinkClosed("the worker reads nothing of what it is sent")
        ticket = self._tickets + 1
        parcel = Parcel(ticket, ticketed(frame, ticket, where), tensor if where is None else None)
        self._tickets = ticket
        return parcel

    def _take_back(self, parcel: Parcel | None, loan: Loan | None) -> None:
        """A task that nobody will wait for is not sent, unless that has begun: then it is answered like any other."""
        with self._lock:
            if parcel is not None and not parcel.claim():
                return
            ticket = 0 if parcel is None else parcel.ticket
            self._open.pop(ticket, None)
            if self._lending is not None and loan is not None:
                self._lending.withdrawn(ticket, loan, self._oldest())

    def _oldest(self) -> int:
        return next(iter(self._open), self._tickets + 1)  # tickets rise, and a dict keeps its order

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise LinkClosed("this link belongs to the process that made it, of which this one is a copy")
        if self.failure is not None:
            raise _again(self.failure)

    # --- receiving --------------------------------------------------------------------------------------------------
    def _read(self) -> None:
        reader = ReplyReader(self._find)
        failure = self._taken(reader, self._after_welcome(reader))
        self._over.set()
        if self._board is not None and self.failure is None:
            self._silent.wait(_LAST_WORDS)  # what the worker said last may still be at the door
        self._break_off(failure)
        self._release()

    def _hear(self, bell: Bell, reader: ReplyReader) -> bool:
        """Takes an answer at the door of shared memory, if there is one; False if there will be no more."""
        try:
            frame = bell.read()
            if frame is None:
                return True
            if frame is not OVER:
                if not self._usual(frame):
                    self._take(reader, frame)
                return True
            failure: LinkError = LinkClosed("the worker ended the link")
        except Exception as error:
            failure = self._meaning(error)
        except BaseException:  # Ctrl-C, of whoever waits: nobody knows what became of the answer
            self._break_off(LinkClosed(_INTERRUPTED))
            raise
        self._silent.set()
        if not isinstance(failure, LinkClosed):
            self._break_off(failure)
        elif self.failure is None:  # the worker has closed the door: its stream says why in a moment
            threading.Thread(target=self._ask_why, args=(failure,), name="darknight-last-words", daemon=True).start()
        return False

    def _usual(self, frame: bytes) -> bool:
        """Takes an answer in shared memory whose frame is to the letter that of an honest worker; False of any other,
        which the reader judges.
        """
        ticket, lending = ticket_of(frame), self._lending
        if ticket is None or lending is None or ticket > self._outbox.sent:
            return False
        question = self._open.get(ticket)
        if question is None or (seconds := question.seconds_of(frame, ticket)) is None:
            return False
        collect, future = question.collect, question.future
        if collect is None or future.cancelled():
            return False
        tensors = collect()
        try:
            with self._lock:
                if self._open.pop(ticket, None) is None:
                    return True  # the link was closed meanwhile
                release = lending.taken(ticket, self._oldest(), tensors)
            if future.set_running_or_notify_cancel():
                layer, call = question.layer, question.call
                future.set_result(Answer(layer=layer, call=call, tensors=tensors, seconds=seconds, release=release))
        except BaseException as error:
            self._lose(ticket, question, error)
            raise
        return True

    def _lose(self, ticket: int, question: Question, error: BaseException) -> None:
        """Who took this answer did not come to its end, and nobody else may know of it any more."""
        self._open.pop(ticket, None)
        why = self._meaning(error) if isinstance(error, Exception) else LinkClosed(_INTERRUPTED)
        with suppress(InvalidStateError):  # it was handed over
            question.future.set_exception(_again(why))

    def _ask_why(self, failure: LinkError) -> None:
        if not self._over.wait(_LAST_WORDS):
            self._break_off(failure)

    def _taken(self, reader: ReplyReader, frames: Iterator[Frame]) -> LinkError:
        """Takes answers until there are no more; returns why."""
        try:
            for frame in frames:
                self._take(reader, frame)
                del frame  # a view of the answer, perhaps, which nobody keeps while the next is waited for
            return LinkClosed("the worker ended the link")
        except Exception as error:  # nobody else would hear of it, and every future must end
            return self._meaning(error)

    def _take(self, reader: ReplyReader, frame: Frame) -> None:
        found = reader.feed(frame)
        if found is not None:
            self._resolve(*found)

    def _meaning(self, error: Exception) -> LinkError:
        """What it means for the link that its worker was heard, and this came of it."""
        match error:
            case LinkError():
                return error
            case BadFrame():
                return Misbehaved(str(error))
            case grpc.RpcError():
                return self._explained(error)
            case _:
                return LinkClosed(f"the link failed with {type(error).__name__}")

    def _after_welcome(self, reader: ReplyReader) -> Iterator[Frame]:
        for frame in self._call:
            if not self._welcome.done():
                self._take_welcome(frame)
                self._settled.wait()
                if self._lending is not None:  # nothing comes here any more but the end
                    self._call.add_done_callback(lambda _: self._ended.set())
                    self._ended.wait()  # gRPC's own waiting looks up ten times a second
                elif self._pipe is not None:
                    yield from self._through(self._pipe, reader)
            elif self._lending is not None or self._pipe is not None:
                raise Misbehaved("an answer through gRPC, on a link of shared memory or with a pipe")
            else:
                yield frame

    def _through(self, pipe: Pipe, reader: ReplyReader) -> Iterator[Frame]:
        """What comes through the pipe. If the stream has ended too, or does so in a moment, that says why."""

        def over(_: object) -> None:
            self._ended.set()
            pipe.hang_up()

        self._call.add_done_callback(over)
        why = "the worker ended the link"
        try:
            while (frame := pipe.receive(reader.place())) is not None:
                yield frame
                del frame
        except PipeBroken as error:
            why = f"the pipe to the worker failed: {error}"
        pipe.hang_up()  # the worker waits for that
        if not self._ended.wait(_LAST_WORDS):
            raise LinkClosed(why)

    def _find(self, ticket: int) -> Question | None:
        if ticket > self._outbox.sent:
            raise Misbehaved("an answer to something that was not sent yet")
        with self._lock:
            return self._open.get(ticket)

    def _take_welcome(self, frame: bytes) -> None:
        try:
            welcome = handshake.read_welcome(frame, self._protocol)
        except handshake.Mismatch as error:
            raise LinkClosed(str(error)) from None
        except handshake.Older as error:
            raise _Outdated(str(error), error.protocol) from None
        if isinstance(welcome, str):
            raise LinkClosed(f"the worker refused the link: {welcome}")
        with suppress(InvalidStateError):  # the link was closed meanwhile
            self._welcome.set_result(welcome)

    def _resolve(self, ticket: int, reply: Reply | None) -> None:
        question = self._open.get(ticket)
        try:
            with self._lock:
                question = self._open.pop(ticket, None)
                if self._lending is not None:
                    answer = reply if question is not None and isinstance(reply, Answer) else None
                    given = self._lending.answered(ticket, self._oldest(), answer)
                    reply = reply if given is None else given
            if question is None or not question.future.set_running_or_notify_cancel() or reply is None:
                return  # the link was closed meanwhile, or the answer is not wanted any more
            if isinstance(reply, Refusal):
                question.future.set_exception(Refused(reply.message))
            else:
                question.future.set_result(reply)
        except BaseException as error:
            if question is not None:
                self._lose(ticket, question, error)
            raise

    def _explained(self, error: Any) -> LinkError:
        """What a status of gRPC means; `details` may be the worker's own words."""
        code, details = error.code(), printable(str(error.details() or ""))[:500]
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
            return Misbehaved(f"a frame of more than {codec.CHUNK} bytes")
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return LinkClosed(f"the worker did not understand this enclave: {details}")
        if code is not grpc.StatusCode.UNAVAILABLE or self._welcome.done():
            return LinkClosed(f"the connection to the worker broke ({code.name.lower()}: {details})")
        return LinkClosed(f"no link to the worker at {self._address}: {_why_unavailable(details, self._certificate)}")

    # --- the end ----------------------------------------------------------------------------------------------------
    def _break_off(self, failure: LinkError) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            left, self._open = list(self._open.values()), {}
        self._outbox.end()
        self._call.cancel()
        if self._pipe is not None:
            self._pipe.hang_up()
        self._settled.set()
        with suppress(InvalidStateError):  # the welcome had come, perhaps just now
            self._welcome.set_exception(failure)
        for question in left:
            if question.future.set_running_or_notify_cancel():
                question.future.set_exception(_again(failure))
        if self._board is not None:
            self._board.wake()

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # gRPC's threads were not copied by the fork, and what they held is held for ever
        self._break_off(LinkClosed("the link was closed"))
        self._release()
        if threading.current_thread() is not self._reader:  # a future's callback may be what closes the link
            self._reader.join(_GRACE)

    def abandon(self) -> None:
        """Nobody has the link any more. The collector says so, in any thread and under any lock: this takes none."""
        if os.getpid() == self._process:
            self._call.cancel()  # the reader does the rest

    def _release(self) -> None:
        self._channel.close()
        if self._lending is not None:
            self._lending.close()
        if self._pipe is not None:
            self._pipe.close()
        _ALIVE.discard(self)


# A copy of this process must not take a stream apart, which waits for threads that it has not got: none is collected
# before it is released.
_ALIVE: set[_Stream] = set()


@atexit.register
def _close_all() -> None:
    for stream in list(_ALIVE):
        stream.close()


def _again(failure: LinkError) -> LinkError:
    """One exception for each who raises it: it collects the frames that it went through, and the tensors in them."""
    return type(failure)(*failure.args)


def _why_unavailable(details: str, certificate: bytes) -> str:
    """gRPC says it in the words of its libraries; this is what they mean."""
    stranger = "it ended the connection. Does it know this enclave's certificate (--allow-enclave)?"
    meanings = {
        "Connection refused": "nothing listens there. Start the worker, or correct the address",
        "CERTIFICATE_VERIFY_FAILED": f"it has another certificate than {fingerprint(certificate)}",
        "Hostname Verification": f"its certificate is not a worker's: it is not made out to {WORKER}",
        "WRONG_VERSION_NUMBER": "what listens there is no worker: it speaks no TLS. Correct the address",
        "resol": "no such host. Correct the address",
        "timed out": "nobody answers there. Correct the address, or let the network through",
        "No route": "no way leads there. Correct the address, or the network",
        "unreachable": "no way leads there. Correct the address, or the network",
        "handshake": "TLS with it failed. Does it run another program than a worker?",
        "Socket closed": stranger,
        "recvmsg": stranger,
        "reset": stranger,
    }
    return next((words for sign, words in meanings.items() if sign in details), details)
