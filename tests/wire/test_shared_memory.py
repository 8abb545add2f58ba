"""Shared memory between the enclave and workers of its machine: what is written arrives, and nothing else happens."""

import fcntl
import gc
import json
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from darknight.errors import OpError
from darknight.types import OpSpec, Weights
from darknight.wire import LinkClosed, arena, mapped, segments, shared_memory
from darknight.wire.arena import Arena, Block
from darknight.wire.lending import Lending
from darknight.wire.mapped import BadPlace, Mapped
from darknight.wire.segments import ALIGNMENT, NOTE, SEAL_FUTURE_WRITE, FreeList, Kind
from darknight.wire.shared_memory import Host, Memory


def pair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def anything(nbytes):
    """An admission that never refuses."""


@pytest.fixture
def ends():
    """An enclave's memory and the worker's view of it, in one process."""
    mine, theirs = pair()
    host = Host()
    memory, view = Memory(host, mine), Mapped(theirs, anything)
    yield memory, view
    view.close()
    memory.close()
    host.close()


def weights(layer="layer", version=0, size=1000):
    tensor = torch.arange(size, dtype=torch.int64) + version
    return Weights(layer=layer, version=version, op=OpSpec("linear"), prime=None, tensor=tensor)


def read(view, block, tensor, *, writable=False):
    return view.tensor(block[:2], tensor.dtype, tuple(tensor.shape), writable=writable)


# --- processes ------------------------------------------------------------------------------------------------------
class Neighbour:
    """A process at the other end of a door; see neighbour.py."""

    def __init__(self, role, door):
        command = [sys.executable, Path(__file__).with_name("neighbour.py"), role, str(door.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[door.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        door.close()

    def ask(self, words):
        self._process.stdin.write(json.dumps(words) + "\n")

    def hear(self):
        assert select.select([self._process.stdout], [], [], 60)[0], "the other process says nothing"
        return json.loads(self._process.stdout.readline())

    def kill(self):
        self._process.kill()
        self._process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()


def segments_of(pid="self"):
    """The inodes of the segments that a process maps or has descriptors of."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:darknight" in line:
            found.add(int(line.split()[4]))
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:darknight" in os.readlink(link):
                found.add(link.stat().st_ino)
        except FileNotFoundError:
            pass  # the descriptor of this listing
    return found


def holders(inodes):
    """Every process of the machine that still has one of these segments."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if segments_of(folder.name) & inodes:
                    found.append(int(folder.name))
            except (OSError, IndexError):
                pass  # it ended meanwhile
    return found


def test_tensors_cross_between_two_processes_and_a_killed_worker_leaves_nothing():
    before = segments_of()
    mine, theirs = pair()
    host = Host()
    with Neighbour("worker", theirs) as worker:
        memory = Memory(host, mine)
        for shape in [(3, 5), (1,), (), (0, 4), (50, 100_001)]:  # the last one needs a segment of its own
            share = torch.arange(prod(shape)).reshape(shape)
            block, answer = memory.put(share), memory.reserve(share.nbytes)
            worker.ask([block[:2], answer[:2], shape])
            assert worker.hear() == "done"
            assert torch.equal(memory.take(answer, shape, torch.int64), 2 * share)
            memory.free(block)
            memory.free(answer)
        block = memory.put(share)
        worker.ask([block[:2], block[:2], shape])
        worker.kill()  # while it is at it
        ours = segments_of() - before
        assert len(ours) == 3
        assert memory.take(block, shape, torch.int64).shape == shape  # the memory is still there
        with pytest.raises(LinkClosed, match="closed its shared-memory socket"):
            memory.reserve(64 << 20)
        memory.close()
        host.close()
        gc.collect()
        assert segments_of() == before
        assert holders(ours) == []


def test_a_killed_enclave_leaves_nothing_and_does_not_take_the_worker_along():
    before = segments_of()
    mine, theirs = pair()
    with Neighbour("enclave", mine) as enclave:
        view = Mapped(theirs, anything)
        share, shared = (tuple(place) for place in enclave.hear())
        tensor = view.tensor(share, torch.int64, (1000,), writable=True)
        known = view.tensor(shared, torch.int64, (1000,), writable=False)
        enclave.kill()
        assert tensor.unique().tolist() == [7]  # reading and writing go on: no SIGBUS
        tensor.add_(1)
        assert torch.equal(known, torch.arange(1000))
        with pytest.raises(BadPlace, match="closed"):
            view.tensor((99, 0), torch.int64, (1000,), writable=False)
        ours = segments_of() - before
        assert len(ours) == 2
        view.close()
        assert tensor.unique().tolist() == [8]  # a tensor outlives the view
        del tensor, known
        gc.collect()
        assert segments_of() == before
        assert holders(ours) == []
    assert not [name for name in os.listdir("/dev/shm") if "darknight" in name]


@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.WEIGHTS])
def test_both_sides_ask_for_large_pages(kind):
    """Whether they get them is up to the system's administrator."""
    descriptor, content = segments.create(segments.SEGMENT, kind)
    theirs = segments.open_segment(descriptor, segments.SEGMENT, kind)
    os.close(descriptor)
    for each in (content, theirs):
        assert "hg" in flags_of(each.data_ptr() + len(each) // 2)
    with mmap.mmap(-1, segments.SEGMENT) as another:
        assert "hg" not in flags_of(np.frombuffer(another, np.uint8).ctypes.data)


def flags_of(address):
    """What the kernel notes about the mapping that the address is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest
    raise AssertionError("an address that is not mapped")


def test_a_worker_cannot_resize_a_segment_nor_write_weights_also_not_as_root():
    mine, theirs = pair()
    host = Host()
    # The control: a memfd without seals, on which everything succeeds.
    bare = os.memfd_create("darknight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(bare, 8192)
    with Neighbour("attacker", theirs) as attacker:
        memory = Memory(host, mine)
        message = weights()
        memory.put(torch.zeros(10))
        memory.put_weights(message)
        socket.send_fds(mine, [NOTE.pack(0, 0, 8192)], [bare])
        results = attacker.hear()
    resizing = ["truncate", "truncate reopened", "grow"]
    writing = ["map", "map reopened", "write", "write reopened", "mprotect", "punch a hole"]
    assert results[str(int(Kind.WEIGHTS))] == []
    assert results[str(int(Kind.PRIVATE))] == writing  # its own: it may, and it hurts nobody else
    assert results["0"] == [*resizing, *writing, "seal"]
    written = host.hold(message)
    assert torch.equal(
        segments.view(written.segment.content, written.block.offset, torch.int64, (1000,)), message.tensor
    )
    os.close(bare)
    memory.close()
    host.close()


# --- the worker's view ----------------------------------------------------------------------------------------------
def test_tensors_arrive_without_a_copy_whatever_their_form(ends):
    memory, view = ends
    for tensor in (
        torch.randn(3, 4).t(),  # not contiguous
        torch.randn(5, dtype=torch.float64, requires_grad=True),
        torch.tensor(3, dtype=torch.int32),
        torch.zeros(0, 3, dtype=torch.int64),
    ):
        block = memory.put(tensor)
        seen = read(view, block, tensor)
        assert seen.dtype == tensor.dtype
        assert torch.equal(seen, tensor)
        if tensor.numel():
            read(view, block, tensor, writable=True).fill_(9)
            assert (seen == 9).all()


def test_what_was_taken_does_not_change_when_the_worker_writes_again(ends):
    memory, view = ends
    block = memory.reserve(80)
    place = view.tensor(block[:2], torch.int64, (10,), writable=True)
    place.fill_(1)
    taken = memory.take(block, (10,), torch.int64)
    place.fill_(2)
    assert taken.tolist() == [1] * 10
    with pytest.raises(ValueError, match="larger than its block"):
        memory.take(block, (11,), torch.int64)


@pytest.mark.parametrize(
    ("offset", "shape", "writable"),
    [(8, (1,), False), (-64, (1,), False), (1 << 40, (1,), True), (0, (1 << 30,), False), (64, (0,), None)],
)
def test_a_place_that_is_not_inside_a_segment_is_refused(ends, offset, shape, writable):
    memory, view = ends
    block = memory.put(torch.zeros(1000))
    end = segments.SEGMENT - ALIGNMENT
    assert view.tensor((block.segment, end), torch.int64, (8,), writable=False).numel() == 8  # just inside
    if writable is None:
        offset, shape, writable = end, (9,), False  # just outside
    with pytest.raises(BadPlace, match="not inside its segment"):
        view.tensor((block.segment, offset), torch.int64, shape, writable=writable)


def test_an_answer_cannot_be_placed_over_weights_and_a_segment_must_arrive(ends, monkeypatch):
    monkeypatch.setattr(mapped, "PATIENCE", 0.1)
    memory, view = ends
    message = weights()
    block = memory.put_weights(message)
    assert torch.equal(read(view, block, message.tensor), message.tensor)
    with pytest.raises(BadPlace, match="over weights"):
        read(view, block, message.tensor, writable=True)
    with pytest.raises(BadPlace, match="not handed over"):
        view.tensor((block.segment + 1, 0), torch.int64, (1,), writable=False)


def test_a_descriptor_may_come_after_the_message_that_needs_it():
    mine, theirs = pair()
    host, view = Host(), Mapped(theirs, anything)
    memory = Memory(host, mine)
    timer = threading.Timer(0.1, memory.put, [torch.full((4,), 5)])
    timer.start()
    assert view.tensor((1, 0), torch.int64, (0,), writable=False).numel() == 0
    timer.join()
    assert view.tensor((1, 0), torch.int64, (4,), writable=False).tolist() == [5] * 4
    for end in (view, memory, host):
        end.close()
        end.close()  # a second time does nothing
    with pytest.raises(BadPlace, match="closed"):
        view.tensor((1, 0), torch.int64, (1,), writable=False)


def test_the_worker_asks_for_room_before_it_reads_and_not_for_answers():
    asked = []

    def admit(nbytes):
        asked.append(nbytes)
        if nbytes > 100:
            raise OpError("no room")

    mine, theirs = pair()
    host, view = Host(), Mapped(theirs, admit)
    memory = Memory(host, mine)
    small, large = memory.put(torch.zeros(10)), memory.put(torch.zeros(100))
    read(view, small, torch.zeros(10))
    read(view, large, torch.zeros(100), writable=True)
    with pytest.raises(OpError, match="no room"):
        read(view, large, torch.zeros(100))
    assert asked == [40, 400]
    for end in (view, memory, host):
        end.close()


def sealed(size, seals, flags=0):
    descriptor = os.memfd_create("darknight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PACKETS = {
    "no shrink seal": (NOTE.pack(1, 1, 4096), lambda: [sealed(4096, fcntl.F_SEAL_GROW)], "not sealed"),
    "no seal seal": (NOTE.pack(1, 1, 4096), lambda: [sealed(4096, fcntl.F_SEAL_SHRINK)], "not sealed"),
    "smaller than announced": (NOTE.pack(1, 1, 8192), lambda: [sealed(4096, FIXED)], "announced with 8192"),
    "larger than announced": (NOTE.pack(1, 1, 4096), lambda: [sealed(8192, FIXED)], "announced with 4096"),
    "empty": (NOTE.pack(1, 1, 0), lambda: [sealed(0, FIXED)], "empty segment"),
    "huge": (NOTE.pack(1, 1, 1 << 50), lambda: [sealed(1 << 50, FIXED)], "more than"),
    "not writable": (NOTE.pack(1, 1, 4096), lambda: [sealed(4096, FIXED | SEAL_FUTURE_WRITE)], "against writing"),
    "huge pages": (NOTE.pack(1, 1, 2 << 20), lambda: [sealed(2 << 20, FIXED, os.MFD_HUGETLB)], "pages of"),
    "no memfd": (NOTE.pack(1, 1, 4096), lambda: [os.open("/proc/self/maps", os.O_RDONLY)], "not a sealed segment"),
    "a device": (NOTE.pack(2, 1, 4096), lambda: [os.open("/dev/zero", os.O_RDWR)], "not a sealed segment"),
    "no descriptor": (NOTE.pack(1, 1, 4096), list, "without its descriptor"),
    "unknown kind": (NOTE.pack(9, 1, 4096), lambda: [sealed(4096, FIXED)], "without its descriptor"),
    "gone, never there": (NOTE.pack(3, 1, 0), list, "unknown"),
    "gone with a descriptor": (NOTE.pack(3, 1, 0), lambda: [sealed(4096, FIXED)], "unknown"),
    "too many descriptors": (NOTE.pack(1, 1, 4096), lambda: [sealed(4096, FIXED) for _ in range(5)], "another form"),
    "too long": (NOTE.pack(1, 1, 4096) + b"!", lambda: [sealed(4096, FIXED)], "another form"),
    "too short": (b"?", list, "another form"),
}


@pytest.mark.parametrize("name", PACKETS)
def test_a_packet_that_is_not_safe_is_refused_and_leaves_no_descriptor(name):
    packet, make, words = PACKETS[name]
    mine, theirs = pair()
    view = Mapped(theirs, anything)
    count = len(os.listdir("/proc/self/fd"))
    try:
        descriptors = make()
    except OSError:
        pytest.skip("this system makes no such file")
    socket.send_fds(mine, [packet], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    with pytest.raises(BadPlace, match=words):
        view.tensor((1, 0), torch.int64, (1,), writable=False)
    assert len(os.listdir("/proc/self/fd")) == count
    view.close()
    mine.close()


def test_the_number_of_segments_is_bounded_and_none_comes_twice(monkeypatch):
    monkeypatch.setattr(mapped, "SEGMENTS", 2)
    for numbers, words in (((1, 2, 3), "more than 2"), ((1, 1), "known already")):
        mine, theirs = pair()
        view = Mapped(theirs, anything)
        descriptor = sealed(4096, FIXED)
        for number in numbers:
            socket.send_fds(mine, [NOTE.pack(1, number, 4096)], [descriptor])
        with pytest.raises(BadPlace, match=words):
            view.tensor((1, 0), torch.int64, (1,), writable=False)
        os.close(descriptor)
        view.close()
        mine.close()


def hand(door, number, size, kind=Kind.PRIVATE):
    descriptor = sealed(size, FIXED)
    socket.send_fds(door, [NOTE.pack(kind, number, size)], [descriptor])
    os.close(descriptor)


def test_what_an_enclave_hands_over_is_bounded_and_the_rest_is_refused_in_words():
    """Pages that nobody wrote are made when the worker reads them, and no budget counts them."""
    mine, theirs = pair()
    asked = []
    view = Mapped(theirs, asked.append, most=8 << 20)

    def first_of(number, **options):
        return view.tensor((number, 0), torch.int64, (8,), **{"writable": False, **options})

    hand(mine, 1, 6 << 20)
    hand(mine, 2, 3 << 20)
    kept = first_of(1)
    for writable in (False, True):
        with pytest.raises(OpError, match=r"no room: this worker maps 8 MiB .* --memory-limit"):
            first_of(2, writable=writable)
    assert len(asked) == 2  # for what was to be read
    hand(mine, 3, 2 << 20)
    first_of(3)  # what fits is still mapped
    mine.send(NOTE.pack(Kind.GONE, 1, 0))
    hand(mine, 4, 6 << 20)
    with pytest.raises(
        OpError, match="no room"
    ):  # what was given back is still there, as long as a share is kept in it
        first_of(4)
    assert kept.tolist() == [0] * 8
    del kept
    mine.send(NOTE.pack(Kind.GONE, 4, 0))
    hand(mine, 5, 6 << 20)
    first_of(5)
    view.close()
    mine.close()


# --- blocks ---------------------------------------------------------------------------------------------------------
SIZES = st.integers(0, 700)


@given(st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 99)), max_size=80))
@settings(max_examples=150, deadline=None)
def test_the_free_list_agrees_with_a_row_of_cells(steps):
    cells = 32
    ranges = FreeList(cells * ALIGNMENT)
    row = [None] * cells  # which block has each cell
    live = {}
    for step, (taking, nbytes, pick) in enumerate(steps):
        if taking:
            need = max(1, -(-nbytes // ALIGNMENT))
            fits = [i for i in range(cells - need + 1) if row[i : i + need] == [None] * need]
            offset = ranges.take(nbytes)
            assert offset == (fits[0] * ALIGNMENT if fits else None)  # the first place where it fits, if any
            if fits:
                live[step] = (offset, nbytes)
                row[fits[0] : fits[0] + need] = [step] * need
        elif live:
            name = sorted(live)[pick % len(live)]
            ranges.give(*live.pop(name))
            row = [None if cell == name else cell for cell in row]
        assert ranges.whole == (not live)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9000), st.integers(0, 99)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_two_live_blocks_overlap_and_freed_memory_is_used_again(steps):
    patch = pytest.MonkeyPatch()
    patch.setattr(arena, "SEGMENT", 8192)
    numbers = iter(range(1, 10_000))
    now = [0.0]
    area = Arena(Kind.PRIVATE, numbers.__next__, lambda: now[0])
    live = []
    try:
        for taking, nbytes, pick in [(True, 0, 0), *steps]:
            if taking:
                segment, block = area.take(nbytes)
                assert block.offset % ALIGNMENT == 0
                assert block.offset + nbytes <= len(segment.content)
                for other in live:
                    if other.segment == block.segment:
                        assert block.offset + nbytes <= other.offset or other.offset + other.nbytes <= block.offset
                live.append(block)
            elif live:
                assert area.give(live.pop(pick % len(live))) == []
        for block in live:
            area.give(block)
            with pytest.raises(ValueError, match="freed before"):
                area.give(block)
        made = next(numbers) - 1
        again = [area.take(arena.SEGMENT)[1] for _ in range(made)]  # every segment is whole again, and no more are made
        assert next(numbers) == made + 2
        for block in again:
            assert area.give(block) == []
        now[0] += arena.IDLE  # all but the one that is used now are given back
        assert len(area.give(area.take(1)[1])) == made - 1
    finally:
        area.close()
        patch.undo()


def test_a_free_segment_goes_back_and_the_worker_is_told(ends, monkeypatch):
    monkeypatch.setattr(arena, "IDLE", 0.0)
    memory, view = ends
    large = torch.arange(5 << 20)  # 40 MiB, a segment of its own
    keep, block = memory.put(torch.zeros(1)), memory.put(large)
    seen = read(view, block, large)
    assert len(segments_of()) >= 2
    ours = segments_of()
    memory.free(block)
    with pytest.raises(ValueError, match="freed before"):
        memory.take(block, (1,), torch.int64)
    memory.free(memory.put(torch.zeros(1)))
    with pytest.raises(OpError, match="given this part"):
        read(view, block, large)
    assert not seen.any()  # who still looks is not harmed, and finds nothing
    del seen
    gc.collect()
    assert len(segments_of()) == len(ours) - 1
    assert read(view, keep, torch.zeros(1)).tolist() == [0]


def pages(descriptor):
    """Bytes of memory that a segment has, whoever maps it."""
    return 512 * os.fstat(descriptor).st_blocks


def test_where_memory_is_short_a_large_block_leaves_nothing_behind(monkeypatch):
    short = [False]
    monkeypatch.setattr(arena, "is_short", lambda: short[0])
    monkeypatch.setattr(arena, "_LARGE", arena.SEGMENT)
    area = Arena(Kind.PRIVATE, iter(range(1, 9)).__next__)
    (first, small), (second, large), (third, other) = (area.take(size) for size in (100, arena.SEGMENT, arena.SEGMENT))
    kept = os.dup(second._descriptor)  # a worker's
    try:
        arena.write(second, large, torch.ones(arena.SEGMENT // 4))
        assert area.give(large) == []  # it is used again while it is warm
        assert pages(kept) >= arena.SEGMENT
        segment, large = area.take(arena.SEGMENT)
        assert segment is second
        short[0] = True
        assert area.give(small) == []  # nobody asks for its sake
        assert area.take(100) == (first, small)
        assert area.give(large) == [second]
        assert pages(kept) == 0
        assert area.give(other) == [third]
    finally:
        area.close()
        os.close(kept)


@pytest.mark.parametrize("ending", ["idle", "closed"])
@pytest.mark.parametrize("kind", [Kind.PRIVATE, Kind.WEIGHTS])
def test_a_worker_that_keeps_a_segment_keeps_no_memory_of_the_enclave_with_it(ending, kind):
    """But for weights: the seal that forbids workers to write them forbids this as well (SECURITY.md)."""
    now = [0.0]
    area = Arena(kind, iter(range(1, 9)).__next__, lambda: now[0])
    segment, block = area.take(3 << 20)
    kept = os.dup(segment._descriptor)  # a worker's
    try:
        arena.write(segment, block, torch.ones(3 << 18))
        mapped = segments.open_segment(kept, segment.free.size, kind)
        assert pages(kept) >= 3 << 20
        if ending == "idle":
            other = area.take(arena.SEGMENT)[1]
            area.give(block)
            now[0] += arena.IDLE
            assert area.give(other) == [segment]
        area.close()
        if kind is Kind.WEIGHTS:
            assert pages(kept) >= 3 << 20
        else:
            assert pages(kept) == 0
            assert not mapped.any()
    finally:
        os.close(kept)


def test_a_place_that_is_shown_and_cannot_be_kept_is_given_back(ends, monkeypatch):
    memory, _ = ends

    def interrupted(self, block, tensor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Memory, "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.show((100,), torch.int64, keep=True)
    first, second = memory.reserve(800), memory.show((10,), torch.int64, keep=True)[0]
    assert first.offset == 0  # nothing is taken but these
    memory.free(first, second)
    with pytest.raises(ValueError, match="not in use"):
        memory.free(second)


def test_what_is_read_in_place_stays_when_the_link_ends_and_goes_with_the_last_who_reads_it(ends):
    """A worker that dies after its answer is no liar: nothing else may be found where its answer was."""
    memory, view = ends
    kept, other = memory.reserve(800), memory.reserve(80)
    answer, further = memory.look(kept, (100,), torch.int64), memory.look(other, (10,), torch.int64)
    written = read(view, kept, answer, writable=True).fill_(7)
    memory.keep(kept, weakref.ref(answer))
    memory.keep(other, weakref.ref(further))
    assert answer.eq(7).all()  # without a copy: it is what the worker wrote after it was handed out
    memory.close()
    assert answer.eq(7).all()
    del answer
    gc.collect()
    assert written.eq(7).all()  # somebody still reads the other, in the same segment
    del further
    gc.collect()
    assert written.eq(0).all()  # the worker has a mapping still, but the pages are the system's again
    memory.free(kept)  # no error
    with pytest.raises(LinkClosed):
        memory.keep(kept, weakref.ref(written))


@pytest.mark.parametrize("broken", [False, True])
def test_what_is_masked_into_a_room_whose_link_has_ended_goes_with_the_room(ends, broken, monkeypatch):
    """The worker keeps a mapping, but no memory of the enclave with it. The control empties the room too early."""
    memory, view = ends
    if broken:
        monkeypatch.setattr(Memory, "keep", lambda self, block, tensor: None)
    lending = Lending(memory)
    room = lending.room((100,), torch.int64)
    (block,) = (block for block, _ in lending._rooms.values())
    seen = read(view, block, room)
    lending.close()
    room.fill_(7)  # the enclave does not know yet
    del room
    gc.collect()
    assert bool(seen.eq(0).all()) == (not broken)


def test_an_answer_that_is_released_after_its_link_ended_leaves_no_mapping(ends):
    """As one that came while the link was being closed: nobody reads it, and nobody asks this link for anything."""
    memory, _ = ends
    kept = memory.reserve(800)
    answer = memory.look(kept, (100,), torch.int64)
    memory.keep(kept, weakref.ref(answer))
    before = _mappings()
    memory.close()
    memory.free(kept)
    del answer
    gc.collect()
    assert _mappings() < before


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:")


def test_a_block_of_another_link_cannot_be_taken_or_freed():
    host, doors = Host(), [pair() for _ in range(2)]
    one, two = (Memory(host, mine) for mine, _ in doors)
    block = one.put(torch.zeros(10))
    two.put(torch.zeros(10))
    for misuse in (lambda: two.free(block), lambda: two.take(block, (1,), torch.int64)):
        with pytest.raises(ValueError, match="another link's"):
            misuse()
    with pytest.raises(ValueError, match="not in use"):
        one.free(Block(block.segment, block.offset, block.nbytes - 1))
    one.close()
    two.close()
    host.close()
    for _, theirs in doors:
        theirs.close()


def test_descriptors_are_not_kept_and_a_dropped_one_is_never_sent(ends):
    memory, view = ends
    count = len(os.listdir("/proc/self/fd"))
    blocks = [memory.reserve(33 << 20) for _ in range(20)]
    for block in blocks:
        view.tensor(block[:2], torch.int64, (1,), writable=True)
    assert len(os.listdir("/proc/self/fd")) == count
    segment = memory._arena.find(blocks[0])
    with pytest.raises(LinkClosed):
        segment.hand_over(memory._door)


# --- weights --------------------------------------------------------------------------------------------------------
def test_weights_are_written_once_for_six_links_and_freed_by_the_last(monkeypatch):
    writes = []
    plain = shared_memory.write
    monkeypatch.setattr(shared_memory, "write", lambda *args: (writes.append(args[1]), plain(*args)))
    host, doors = Host(), [pair() for _ in range(6)]
    memories = [Memory(host, mine) for mine, _ in doors]
    views = [Mapped(theirs, anything) for _, theirs in doors]
    places = []
    for version in range(4):
        message = weights(version=version)
        blocks = {memory.put_weights(message) for memory in memories}
        assert len(blocks) == 1
        assert len(writes) == version + 1
        for view in views:
            assert torch.equal(read(view, *blocks, message.tensor), message.tensor)
        places.append(blocks.pop())
        if version:
            for memory in memories:
                memory.forget_weights("layer", version - 1)
    assert places[2] == places[0]  # two versions take turns in the same memory
    assert places[3] == places[1]
    for memory in memories[:-1]:
        memory.forget_weights("layer", 3)
    assert memories[0].put_weights(message) == places[3]  # it is still there
    assert len(writes) == 4
    memories[0].forget_all_weights()
    memories[-1].close()  # a link that closes forgets everything
    assert memories[0].put_weights(weights(version=7)) == places[0]
    assert memories[0].put_weights(weights(version=8)) == places[1]  # so both places were free
    same = weights(version=8)
    memories[0].put_weights(same)  # another message of that version takes the place of the first
    assert memories[0].put_weights(weights(version=9)) == places[1]
    assert len(writes) == 8
    for end in (*memories, *views, host):
        end.close()
    with pytest.raises(LinkClosed):
        memories[0].put_weights(message)


def test_weights_posted_from_many_threads_are_written_once(monkeypatch):
    writes = []
    plain = shared_memory.write
    monkeypatch.setattr(shared_memory, "write", lambda *args: (writes.append(1), plain(*args)))
    host, doors = Host(), [pair() for _ in range(6)]
    memories = [Memory(host, mine) for mine, _ in doors]
    message = weights(size=1 << 20)
    threads = [threading.Thread(target=memory.put_weights, args=[message]) for memory in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(writes) == 1
    for end in (*memories, host):
        end.close()
    for _, theirs in doors:
        theirs.close()


# --- workers that do nothing ----------------------------------------------------------------------------------------
def test_a_worker_that_takes_nothing_cannot_hold_the_enclave_up(monkeypatch):
    monkeypatch.setattr(arena, "SEGMENT", 4096)
    monkeypatch.setattr(shared_memory, "STALL", 0.2)
    mine, theirs = pair()
    memory = Memory(Host(), mine)
    longest = 0.0

    def fill():
        nonlocal longest
        for _ in range(5000):
            begun = time.monotonic()
            try:
                memory.reserve(4096)
            finally:
                longest = max(longest, time.monotonic() - begun)

    with pytest.raises(LinkClosed, match="has taken nothing"):
        fill()
    assert 0.2 <= longest < 30.0
    memory.close()
    theirs.close()


@pytest.mark.parametrize("kind", ["shares", "weights"])
def test_closing_does_not_wait_for_a_worker_that_takes_nothing(monkeypatch, kind):
    monkeypatch.setattr(arena, "SEGMENT", 4096)
    monkeypatch.setattr(shared_memory, "STALL", 60.0)
    mine, theirs = pair()
    host = Host()
    memory = Memory(host, mine)
    outcome = []

    def fill():
        try:
            for version in range(900):
                if kind == "shares":
                    memory.reserve(4096)
                else:
                    memory.put_weights(weights(version=version, size=512))
                outcome.append("there")
        except LinkClosed as error:
            outcome.append(str(error))

    thread = threading.Thread(target=fill)
    thread.start()
    count = -1
    while count != len(outcome):  # until the thread is stuck
        count = len(outcome)
        thread.join(0.2)
    assert thread.is_alive()
    memory.close()
    thread.join(30)
    assert not thread.is_alive()
    assert outcome[-1] == "the link was closed"
    host.close()
    theirs.close()


def test_no_memory_is_an_error_in_words(ends, monkeypatch):
    memory, _ = ends
    with pytest.raises(MemoryError, match=r"no shared memory of .* Free memory"):
        memory.reserve(1 << 60)
    assert memory.reserve(10).nbytes == 10


@pytest.mark.full
def test_shared_memory_costs_about_as_much_as_plain_copies(ends):
    """There and out again, 64 MiB that were used before, against as many plain copies."""
    memory, _ = ends
    tensor = torch.arange(16 << 20, dtype=torch.int32)

    def through():
        block = memory.put(tensor)
        memory.take(block, tuple(tensor.shape), tensor.dtype)
        memory.free(block)

    def plain():
        tensor.clone().clone()

    times = {through: [], plain: []}
    through()
    for _ in range(7):
        for work, found in times.items():
            begun = time.perf_counter()
            work()
            found.append(time.perf_counter() - begun)
    print(f"through shared memory {min(times[through]):.4f} s, two plain copies {min(times[plain]):.4f} s")
    assert min(times[through]) < 2 * min(times[plain])
