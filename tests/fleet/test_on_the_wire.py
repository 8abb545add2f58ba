"""Somebody on the way between the enclave and its workers records every byte of a training, and sees noise.

A proxy stands where the fleet file says that the workers are, and others where they wait with their pipes. What they
recorded is taken apart as TLS 1.3 and as sealed records, and searched for everything that was said. The same is done
with the same messages sent in the clear, where everything must be found.
"""

import socket
import struct
import threading
import zlib
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from torch import nn

from darknight.coding import Scheme
from darknight.fleet import connect
from darknight.nn import protect_, unprotect_
from darknight.runtime import Runtime
from darknight.types import ForwardTask, Weights
from darknight.wire import codec, handshake
from darknight.wire.doors import TOKEN
from darknight.wire.grpc_link import GrpcLink
from darknight.wire.identity import CERTIFICATE_FILE, WORKER
from darknight.wire.readers import raw
from fleet.observing import smooth_images
from fleet.workers import real_workers

SCHEME = Scheme(inputs=1, colluders=1, mask_gradients=False)  # gradients in the clear, but for TLS
OPERATORS = ("northern-light", "southern-cross")
LAYERS = ("hidden_convolution", "hidden_classifier")
TIMES = 2  # that the enclave connects
WINDOW = 16  # bytes that are no coincidence

HANDSHAKE, CHANGE_CIPHER, APPLICATION = 22, 20, 23
SUPPORTED_VERSIONS, KEY_SHARE, SERVER_NAME = 43, 51, 0
TLS13 = b"\x03\x04"

pytestmark = pytest.mark.usefixtures("one_thread")


# --- the tap ----------------------------------------------------------------------------------------------------------
@dataclass
class Conversation:
    """All bytes of one connection, from the enclave (`up`) and to it."""

    pipe: bool = False
    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)


class Tap:
    """Listens on a port of its own, passes everything on to `target` and back, and keeps a copy."""

    def __init__(self, target, *, at=("127.0.0.1", 0), pipe=False):
        self._pipe = pipe
        host, port = target.rsplit(":", 1)
        self._target = host, int(port)
        self.conversations = []
        self._sockets = [socket.create_server(at)]
        self.address = f"{at[0]}:{self._sockets[0].getsockname()[1]}"
        self._threads = []
        self._run(self._accept)

    def _run(self, work, *arguments):
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self):
        with suppress(OSError):  # closed
            while True:
                enclave = self._sockets[0].accept()[0]
                worker = socket.create_connection(self._target)
                self._sockets += [enclave, worker]
                self.conversations.append(Conversation(self._pipe))
                self._run(_pass_on, enclave, worker, self.conversations[-1].up)
                self._run(_pass_on, worker, enclave, self.conversations[-1].down)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for sock in list(self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes its thread
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


def taps_of(worker, stack):
    """One where a worker listens, and one for its pipes: at another address, and there at the port that it names."""
    stream = stack.enter_context(Tap(worker.address, at=("127.0.0.2", 0)))
    port = worker.pipe_port
    return stream, stack.enter_context(Tap(f"127.0.0.1:{port}", at=("127.0.0.2", port), pipe=True))


def _pass_on(source, sink, copy):
    with suppress(OSError):
        while part := source.recv(1 << 16):
            copy += part
            sink.sendall(part)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


# --- TLS --------------------------------------------------------------------------------------------------------------
def tls_records(stream):
    """(type, payload) of every record, or AssertionError where the bytes are no record. The end may cut the last."""
    found, place = [], 0
    while place < len(stream):
        head = bytes(stream[place : place + 5])
        if len(head) == 5:
            kind, version, length = struct.unpack(">BHH", head)
            assert kind in (HANDSHAKE, CHANGE_CIPHER, APPLICATION), f"byte {place}: a record of type {kind}"
            assert version in (0x0301, 0x0303), f"byte {place}: a record of version {version:#x}"
            assert 0 < length <= (1 << 14) + 256, f"byte {place}: a record of {length} bytes"
            found.append((kind, bytes(stream[place + 5 : place + 5 + length])))
            place += length
        place += 5
    return found


def hello_of(record):
    """random, and extensions by number, of a ClientHello or ServerHello."""
    kind, payload = record
    assert kind == HANDSHAKE
    message, rest = payload[0], payload[4:]
    assert message in (1, 2)
    assert int.from_bytes(payload[1:4], "big") == len(rest)
    random, rest = rest[2:34], rest[34:]
    rest = rest[1 + rest[0] :]  # the session's number
    if message == 1:
        rest = rest[2 + int.from_bytes(rest[:2], "big") :]  # cipher suites
        rest = rest[1 + rest[0] :]  # compressions
    else:
        rest = rest[3:]  # one of each
    extensions, rest = {}, rest[2:]
    while rest:
        number, length = struct.unpack(">HH", rest[:4])
        extensions[number], rest = rest[4 : 4 + length], rest[4 + length :]
    return SimpleNamespace(random=random, extensions=extensions)


def server_name():
    """The extension of that name: a list of one name of type 0. It is the same for all workers."""
    name = WORKER.encode()
    return struct.pack(">HBH", len(name) + 3, 0, len(name)) + name


def pipe_records(stream):
    """What is behind the word with which it begins: the sealed frames. The end may cut the last."""
    found, place = [], TOKEN
    while place < len(stream):
        length = int.from_bytes(stream[place : place + 4], "big")
        assert 16 < length <= codec.CHUNK + 16, f"byte {place}: a record of {length} bytes"
        found.append(bytes(stream[place + 4 : place + 4 + length]))
        place += 4 + length
    return found


def contents_of(conversation):
    """The encrypted part in each direction: what was said, as it went over the wire."""
    for stream in (conversation.up, conversation.down):
        if conversation.pipe:
            yield b"".join(pipe_records(stream))
        else:
            yield b"".join(payload for kind, payload in tls_records(stream) if kind == APPLICATION)


# --- searching --------------------------------------------------------------------------------------------------------
def windows(content):
    """A number for every WINDOW bytes in a row, at every offset; without those whose two halves are the same."""
    eights = np.lib.stride_tricks.sliding_window_view(np.frombuffer(content, np.uint8), 8)
    eights = np.ascontiguousarray(eights).view(np.uint64).ravel()
    first, second = eights[:-8], eights[8:]
    return np.unique((first * np.uint64(0x9E3779B97F4A7C15) + second * np.uint64(0xC2B2AE3D27D4EB4F))[first != second])


def in_common(left, right):
    return len(np.intersect1d(left, right, assume_unique=True))


def evenness(content):
    """How well it compresses, and how far the counts of byte values are from equal, in standard deviations."""
    counts = np.bincount(np.frombuffer(content, np.uint8), minlength=256)
    expected = len(content) / 256
    surplus = float(((counts - expected) ** 2 / expected).sum()) - 255
    return len(zlib.compress(content, 9)) / len(content), surplus / (2 * 255) ** 0.5


def search(capture, site):
    """How many of the words, and how many windows of everything else, are in the capture."""
    found = {word: capture.count(word) for word in site.words}
    ours = windows(capture)
    return found | {name: in_common(ours, material) for name, material in site.material.items()}


# --- a training -------------------------------------------------------------------------------------------------------
def train(fleet, images):
    torch.manual_seed(1)
    model = nn.Sequential()
    model.add_module(LAYERS[0], nn.Conv2d(1, 4, 3, stride=2))
    model.extend([nn.ReLU(), nn.Flatten()])
    model.add_module(LAYERS[1], nn.Linear(4 * 11 * 11, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Runtime(SCHEME, fleet) as runtime:
        protect_(model, runtime)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), torch.arange(len(images))).backward()
            optimizer.step()
        unprotect_(model)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """What was recorded between an enclave and its workers, and all that they told each other."""
    folder, images = tmp_path_factory.mktemp("site"), smooth_images(8, seed=300)
    messages, futures = [], []
    post, ask = GrpcLink.post, GrpcLink.ask

    def spy_post(link, message):
        if isinstance(message, Weights):
            messages.append(message)
        post(link, message)

    def spy_ask(link, task, expected):
        messages.append(task)
        futures.append(ask(link, task, expected))
        return futures[-1]

    with ExitStack() as stack:
        workers = stack.enter_context(real_workers(folder, {operator: {} for operator in OPERATORS}))
        taps, entries = [], []
        for worker in workers:
            taps += taps_of(worker, stack)
            entries.append(worker.entry.replace(worker.address, taps[-2].address))
        (folder / "fleet.toml").write_text("\n".join(entries))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(GrpcLink, "post", spy_post)
        patch.setattr(GrpcLink, "ask", spy_ask)
        for _ in range(TIMES):
            with connect(folder / "fleet.toml", patience=60) as fleet:
                train(fleet, images)
                assert all(fleet.ready(worker) for worker in range(len(OPERATORS))), (
                    "a worker failed, and its part was not recorded"
                )
    answers = [future.result() for future in futures]
    certificates = [_der(folder / name / CERTIFICATE_FILE) for name in (*OPERATORS, "enclave")]
    quantised = (images * 512).to(torch.int32)  # as an enclave without masks would send them
    seeds = [message.seed for message in messages if not isinstance(message, Weights) and message.seed is not None]
    sent = [message.tensor for message in messages if isinstance(message, Weights) or message.seed is None]
    tensors = sent + [t for answer in answers for t in answer.tensors.values()]
    conversations = [conversation for tap in taps for conversation in tap.conversations]
    return SimpleNamespace(
        conversations=conversations,
        streams=[conversation for conversation in conversations if not conversation.pipe],
        pipes=[conversation for conversation in conversations if conversation.pipe],
        messages=messages,
        answers=answers,
        certificates=certificates,
        images=(images, quantised),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        words=[
            *(word.encode() for word in LAYERS + OPERATORS),
            b'"name":"conv"',
            b'"name":"linear"',
            b'"shape":[',
            b'"seed":',
        ],
        material={
            "weights": _windows_of(message.tensor for message in messages if isinstance(message, Weights)),
            "shares": _windows_of(message.tensor for message in messages if not isinstance(message, Weights)),
            "seeds": np.unique(np.concatenate([windows(seed.key.hex().encode()) for seed in seeds])),
            "answers": _windows_of(tensor for answer in answers for tensor in answer.tensors.values()),
            "images": _windows_of([images]),
            "quantised images": _windows_of([quantised]),
            "certificates": _windows_of_certificates(certificates),
        },
    )


def _der(path):
    return x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(Encoding.DER)


def _windows_of(tensors):
    return np.unique(np.concatenate([windows(raw(tensor)) for tensor in tensors]))


def _windows_of_certificates(certificates):
    """Without their common name, which the enclave's hello says in the clear: see `server_name`."""
    found = np.unique(np.concatenate([windows(certificate) for certificate in certificates]))
    return np.setdiff1d(found, windows(server_name()), assume_unique=True)


@pytest.fixture(scope="module")
def in_the_clear(site):
    """The same messages, twice, through the same tap, as frames in the clear; and images, as if nothing was masked."""
    frames = [handshake.welcome({"operator": operator, "device": "cpu", "memory": 0}, None) for operator in OPERATORS]
    frames += site.certificates
    for message in site.messages:
        frames += [codec.pack(codec.header_of(message)), bytes(raw(message.tensor))]
    for answer in site.answers:
        frames += [codec.pack(codec.reply_header(answer)), *(bytes(raw(t)) for t in answer.tensors.values())]
    for images in site.images:
        task = ForwardTask(layer=LAYERS[0], call=0, version=0, tensor=images, compute=True, keep=True)
        frames += [codec.pack(codec.header_of(task)), bytes(raw(images))]
    with socket.create_server(("127.0.0.1", 0)) as server, Tap(f"127.0.0.1:{server.getsockname()[1]}") as tap:
        host, port = tap.address.split(":")
        for _ in range(2):
            with socket.create_connection((host, int(port))) as enclave:
                worker = server.accept()[0]
                _answering_nothing(enclave, worker, b"".join(frames))
    return [bytes(conversation.up) for conversation in tap.conversations]


def _answering_nothing(enclave, worker, content):
    """Sends it, and waits until all of it arrived."""
    sender = threading.Thread(target=lambda: (enclave.sendall(content), enclave.shutdown(socket.SHUT_WR)))
    sender.start()
    with worker:
        while worker.recv(1 << 16):
            pass
    sender.join()


# --- the tests --------------------------------------------------------------------------------------------------------
def test_every_byte_is_tls_1_3_or_sealed(site, capsys):
    """One hello in each direction, or one word, then nothing but encrypted records; and all went through the taps."""
    streams, pipes = site.streams, site.pipes
    assert len(streams) == len(pipes) == TIMES * len(OPERATORS)
    kinds, total = Counter(), 0
    for conversation in streams:
        for stream in (conversation.up, conversation.down):
            found = [kind for kind, _ in tls_records(stream)]
            kinds.update(found)
            rest = found[2:] if found[1] == CHANGE_CIPHER else found[1:]
            assert found[0] == HANDSHAKE
            assert rest
            assert set(rest) == {APPLICATION}, "something that is not encrypted after the hello"
        server = hello_of(tls_records(conversation.down)[0])
        assert server.extensions.get(SUPPORTED_VERSIONS) == TLS13, "not TLS 1.3"
    for conversation in pipes:
        total += sum(len(content) for content in contents_of(conversation))
        kinds["sealed"] += len(pipe_records(conversation.up)) + len(pipe_records(conversation.down))
    words = [bytes(stream[:TOKEN]) for talk in pipes for stream in (talk.up, talk.down)]
    assert len(set(words)) == len(words)
    with capsys.disabled():
        print(f"\nwire: {total / 1e6:.2f} MB in {sum(kinds.values())} records {dict(kinds)}", end="")
    assert total > site.nbytes, "less than was sent: the taps missed something"


def test_nothing_that_was_said_is_on_the_wire(site, capsys):
    """Not in the hellos either: these say that it is TLS, with HTTP/2, for somebody called darknight-worker."""
    capture = b"".join(bytes(stream) for talk in site.conversations for stream in (talk.up, talk.down))
    found = search(capture, site)
    with capsys.disabled():
        sizes = ", ".join(f"{len(material)} windows of {name}" for name, material in site.material.items())
        print(f"\nwire: {sum(found.values())} finds of {len(site.words)} words and {sizes}", end="")
    assert not [name for name, count in found.items() if count]
    for conversation in site.streams:
        assert hello_of(tls_records(conversation.up)[0]).extensions[SERVER_NAME] == server_name()


def test_everything_is_found_in_the_clear(site, in_the_clear, capsys):
    found = search(in_the_clear[0], site)
    with capsys.disabled():
        print(f"\nin the clear: {sum(found.values())} finds", end="")
    assert not [name for name, count in found.items() if not count]
    for name, material in site.material.items():
        assert found[name] == len(material), f"only a part of the {name}"
    for records in (tls_records, pipe_records):
        with pytest.raises(AssertionError, match="a record of"):
            records(in_the_clear[0])


def test_the_content_looks_like_noise(site, in_the_clear, capsys):
    figures = []
    for conversation in site.pipes:
        for content in contents_of(conversation):
            assert len(content) > 50_000, "too little to judge"
            figures.append(evenness(content))
    ratio, deviations = min(r for r, _ in figures), max(d for _, d in figures)
    plain_ratio, plain_deviations = evenness(in_the_clear[0])
    with capsys.disabled():
        print(
            f"\nwire: compresses to {ratio:.4f}, byte values {deviations:.1f} deviations from equal; "
            f"in the clear {plain_ratio:.4f}, {plain_deviations:.0f}",
            end="",
        )
    assert ratio > 0.999
    assert deviations < 7
    assert plain_ratio < 0.95
    assert plain_deviations > 1000


def test_links_have_keys_of_their_own(site, in_the_clear, capsys):
    """Also a second connection of the same enclave to the same worker. Weights went to all, in different bytes."""
    hellos = [hello_of(tls_records(stream)[0]) for talk in site.streams for stream in (talk.up, talk.down)]
    assert len({hello.random for hello in hellos}) == len(hellos)
    assert len({hello.extensions[KEY_SHARE] for hello in hellos}) == len(hellos)
    contents = [windows(next(contents_of(talk))) for talk in site.conversations]
    shared = max(in_common(left, right) for left, right in combinations(contents, 2))
    without = in_common(*map(windows, in_the_clear))
    with capsys.disabled():
        print(f"\nwire: windows that two links have in common: {shared}; in the clear {without}", end="")
    assert shared == 0
    assert without > 100_000
