"""Doors: who knows the word gets in, nobody else, and nobody can hold up the others."""

import os
import secrets
import socket
import stat
import threading
import time

import pytest

from darknight.errors import FleetError
from darknight.wire import LinkClosed, Misbehaved, doors
from darknight.wire.doors import keeper_at, knock, listen_at


def words():
    return secrets.token_bytes(16), secrets.token_bytes(16)


@pytest.fixture(params=["path", "abstract"])
def name(request, tmp_path):
    return str(tmp_path / "door") if request.param == "path" else f"@darknight-test-{secrets.token_hex(8)}"


@pytest.fixture
def keeper(name):
    made = keeper_at(name)
    yield made
    made.close()


def visitor(name):
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect("\0" + name[1:] if name.startswith("@") else name)
    made.settimeout(10)
    return made


def test_both_sides_know_each_other_by_their_words(keeper, name):
    rooms = []
    for _ in range(3):  # several enclaves at one door
        mine, theirs = words()
        visit = keeper.expect(mine, theirs)
        door = knock(name, mine, theirs, 5)
        rooms.append((door, visit.wait(5)))
    for number, (door, inside) in enumerate(rooms):
        door.send(bytes([number]))
        assert inside.recv(10) == bytes([number])
        door.close()
        inside.close()


def test_a_word_opens_the_door_once(keeper, name):
    mine, theirs = words()
    visit = keeper.expect(mine, theirs)
    knock(name, mine, theirs, 5).close()
    visit.wait(5).close()
    with pytest.raises(Misbehaved):
        knock(name, mine, theirs, 5)


@pytest.mark.parametrize("word", [b"", b"x", bytes(16), bytes(17), bytes(5000)])
def test_a_stranger_hears_nothing(keeper, name, word):
    mine, theirs = words()
    visit = keeper.expect(mine, theirs)
    with visitor(name) as stranger:
        stranger.send(word or mine[:-1])
        assert stranger.recv(100) == b""
    knock(name, mine, theirs, 5).close()
    visit.wait(5).close()


def test_the_right_word_with_more_after_it_is_wrong(keeper, name):
    mine, theirs = words()
    keeper.expect(mine, theirs)
    with visitor(name) as stranger:
        stranger.send(mine + b"!")
        assert stranger.recv(100) == b""


def test_a_crowd_of_silent_visitors_holds_nobody_up(keeper, name, monkeypatch):
    monkeypatch.setattr(doors, "_PATIENCE", 600.0)
    crowd = [visitor(name) for _ in range(3 * doors._VISITORS)]
    mine, theirs = words()
    visit = keeper.expect(mine, theirs)
    knock(name, mine, theirs, 10).close()
    visit.wait(10).close()
    for silent in crowd[: 2 * doors._VISITORS]:
        assert silent.recv(100) == b""  # those who have been there for longest had to make room
    for silent in crowd:
        silent.close()


def test_a_silent_visitor_is_shown_out(keeper, name, monkeypatch):
    monkeypatch.setattr(doors, "_PATIENCE", 0.1)
    with visitor(name) as silent:
        assert silent.recv(100) == b""


def test_descriptors_that_a_stranger_brings_are_dropped(keeper, name):
    count = len(os.listdir("/proc/self/fd"))
    with visitor(name) as stranger:
        socket.send_fds(stranger, [bytes(16)], [0, 1])
        assert stranger.recv(100) == b""
        assert len(os.listdir("/proc/self/fd")) == count + 1  # the stranger's own end, and nothing else


def test_another_program_at_the_workers_name_gets_nothing_more():
    name = f"@darknight-test-{secrets.token_hex(8)}"
    heard = []

    def impostor():
        listener.setblocking(True)
        guest, _ = listener.accept()
        heard.append(guest.recv(100))
        guest.send(bytes(16))
        heard.append(guest.recv(100))
        guest.close()

    mine, theirs = words()
    with listen_at(name) as listener:
        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(Misbehaved, match="another program"):
            knock(name, mine, theirs, 5)
        thread.join()
        assert heard == [mine, b""]
        begun = time.monotonic()
        with pytest.raises(LinkClosed, match="no answer in time"):
            knock(name, mine, theirs, 0.2)  # one who never answers
        assert time.monotonic() - begun < 30


def test_a_full_queue_is_waited_for():
    name = f"@darknight-test-{secrets.token_hex(8)}"
    mine, theirs = words()
    with listen_at(name) as listener:
        crowd = []
        for _ in range(doors._VISITORS + 1):  # as many as the kernel lets wait
            crowd.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            crowd[-1].connect("\0" + name[1:])

        def let_in():
            listener.setblocking(True)
            for guest in (listener.accept()[0] for _ in range(len(crowd) + 1)):
                with guest:
                    if guest.recv(100) == mine:
                        guest.send(theirs)

        thread = threading.Timer(0.1, let_in)
        thread.start()
        for silent in crowd:
            silent.close()
        knock(name, mine, theirs, 10).close()
        thread.join()
        for _ in range(doors._VISITORS + 1):
            crowd.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            crowd[-1].connect("\0" + name[1:])
        with pytest.raises(LinkClosed, match="nobody opens"):
            knock(name, mine, theirs, 0.1)
        for silent in crowd:
            silent.close()


def test_nobody_there_is_said_in_words(name):
    with pytest.raises(LinkClosed, match="nobody opens"):
        knock(name, *words(), 1)
    for bad in ("", "@", "x" * 200, "a\0b"):
        with pytest.raises(LinkClosed, match="--shared-memory"):
            knock(bad, *words(), 1)


def test_an_enclave_that_does_not_come_is_not_waited_for_for_ever(keeper, name):
    mine, theirs = words()
    visit = keeper.expect(mine, theirs)
    with pytest.raises(TimeoutError):
        visit.wait(0.05)
    with pytest.raises(Misbehaved):  # and now it is too late
        knock(name, mine, theirs, 5)
    late = keeper.expect(mine, theirs)
    door = knock(name, mine, theirs, 5)
    late.cancel()
    late.cancel()
    door.settimeout(5)
    assert door.recv(10) == b""  # nobody took it: closed
    door.close()


def test_a_word_of_another_length_is_refused(keeper):
    with pytest.raises(ValueError, match="16 bytes"):
        keeper.expect(b"short", bytes(16))


def test_closing_ends_the_thread_the_path_and_those_who_wait(name):
    before = set(threading.enumerate())
    count = len(os.listdir("/proc/self/fd"))
    keeper = keeper_at(name)
    mine, theirs = words()
    visit = keeper.expect(mine, theirs)
    kept = keeper.expect(*words()[::-1])
    door = knock(name, mine, theirs, 5)
    inside = visit.wait(5)
    silent = visitor(name)
    keeper.close()
    keeper.close()
    with pytest.raises(TimeoutError):
        kept.wait(60)
    door.send(b"still open")
    assert inside.recv(20) == b"still open"
    assert set(threading.enumerate()) == before
    assert name.startswith("@") or not os.path.exists(name)
    for left in (door, inside, silent):
        left.close()
    assert len(os.listdir("/proc/self/fd")) == count


def test_a_path_of_a_dead_worker_is_replaced_and_a_live_one_refused(tmp_path):
    path = str(tmp_path / "door")
    dead = listen_at(path)
    dead.close()  # without removing the path, as kill -9 would
    assert os.path.exists(path)
    with listen_at(path) as alive:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(FleetError, match="another worker listens there"):
            listen_at(path)
        assert alive.fileno() >= 0
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FleetError, match="no socket"):
        listen_at(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(FleetError, match="cannot listen there"):
        listen_at(str(tmp_path / "missing" / "door"))
    with pytest.raises(FleetError, match="needs a path or @name"):
        listen_at("x" * 200)


def test_an_abstract_name_is_free_again_at_once():
    name = f"@darknight-test-{secrets.token_hex(8)}"
    with listen_at(name), pytest.raises(FleetError, match="another worker listens there"):
        listen_at(name)
    listen_at(name).close()
