"""Who owns the enclave's machine records everything that it writes and sends, and finds nothing of a job in it.

Data, labels, keys, optimizer state, weights and figures are looked for by their bytes and by correlation
(tests/service/scanning.py says how likely chance is). What is looked for is what was there: the same training without
an enclave has the same bits. And everything is found, by the same search, where nothing hides it.
"""

import base64
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from darknight.cli.messages import LogLevel, messages_on
from darknight.errors import TrustError
from darknight.service.queue import FINISHED, READY, RUNNING
from darknight.train.checkpoint import MODEL, OPTIMIZER, checkpoint_as_bytes
from darknight.train.tensor_file import tensors_from_bytes
from darknight.trust.blob import open_bytes
from darknight.trust.bundle import unpacked
from darknight.wire.identity import KEY_FILE
from fleet.test_on_the_wire import (
    APPLICATION,
    CHANGE_CIPHER,
    HANDSHAKE,
    SUPPORTED_VERSIONS,
    TLS13,
    Tap,
    _answering_nothing,
    hello_of,
    pipe_records,
    tls_records,
)
from service.confined import can_confine
from service.recorded import (
    CONFINED,
    ENDS,
    can_be_read,
    core_limits,
    keys_of,
    record,
    sought_of,
    streams,
    train_alone,
)
from service.scanning import CORRELATION, THRESHOLD, scan
from service.watching import Kept, Watch

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES = ("disk", "log", "client wire", "worker wire")
ALL = {"images", "labels", "keys", "private keys", "momentum", "weights", "figures", CORRELATION}


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return record(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def truth(recording, tmp_path_factory, one_thread):
    return train_alone(tmp_path_factory.mktemp("plain"), recording)


@pytest.fixture(scope="module")
def sought(recording, truth):
    summary = json.loads(recording.result["summary.json"])
    return sought_of(recording, truth, [figure for epoch in summary["epochs"] for figure in epoch.values()])


# --- what was there ---------------------------------------------------------------------------------------------------
def base(kept):
    """What a file is called when it is finished."""
    name = min(kept.names, key=len).rpartition("/")[2]
    return name.removeprefix(".unfinished-").removeprefix("upload-")


def opened(recording, kept):
    """The files in a sealed one, by name."""
    job, name = recording.job, base(kept)
    checkpoint = re.fullmatch(r"checkpoint-(\d+)-\d+\.sealed", name)
    purpose, what = ("checkpoint", f"checkpoint {int(checkpoint[1])}") if checkpoint else ("result", "result")
    label = f"{job.text.name} {what}".encode()
    return unpacked(open_bytes(job.keys.derived(purpose), kept.path.read_bytes(), label=label), kept.path)


def test_what_is_looked_for_is_what_was_there(recording, truth):
    """Weights and momentum after every step, and the weights of the result, are those of the training that we know."""
    found = {}
    for kept in recording.files:
        if base(kept).startswith("checkpoint-"):
            with suppress(TrustError):  # one that a crash cut short, and that was written again
                found[base(kept)] = opened(recording, kept)
    assert len(found) == len(truth.checkpoints) == 8
    for name, expected in zip(sorted(found), truth.checkpoints, strict=True):
        assert same(found[name][OPTIMIZER], expected.optimizer), f"{name}: another momentum"
        assert same(found[name][MODEL], expected.model), f"{name}: other weights"
    assert same(recording.result[MODEL], truth.checkpoints[-1].model)


def same(content, expected):
    tensors, _, _ = tensors_from_bytes(content, Path(MODEL))
    return (
        len(tensors) > 1
        and tensors.keys() == expected.keys()
        and all(torch.equal(tensors[n], expected[n]) for n in tensors)
    )


# --- the disk ---------------------------------------------------------------------------------------------------------
def kind_of(recording, kept):
    """What a file is, after a look at all of it. Masks are in none: each byte belongs to something else."""
    name, content = base(kept), kept.path.read_bytes()
    if kept.names == {"enclave.log"}:
        return "the log"
    (folder,) = {each.rpartition("/")[0].removesuffix("/data") for each in kept.names}
    assert folder == f"state/jobs/00000001-{recording.job.text.name}"
    if all("/.unfinished-" in each for each in kept.names):
        return "cut short by a crash"
    if name == "job.json":
        assert content == recording.job.text.encode()
    elif name == "state.json":
        words = json.loads(content)
        assert words.keys() == {"state", "note"}
        assert words["state"] in (READY, RUNNING, FINISHED)
        assert words["note"] == ""
    elif name in ("manifest.json", "head", "records"):
        assert content == (recording.job.sealed / name).read_bytes(), "not as the client sent it"
        return "sealed by the client"
    else:
        assert opened(recording, kept)  # all of it: a blob has no byte that is not sealed, but its first 36
        return "sealed by the enclave"
    return name


def test_every_file_is_of_a_known_kind(recording, tally):
    """Each that ever was in the one folder that the enclave can write to."""
    kinds = Counter(kind_of(recording, kept) for kept in recording.files)
    tally("files an enclave wrote", dict(kinds))
    assert recording.missed == 0, "some were gone before they could be looked at"
    assert kinds["sealed by the enclave"] >= 9  # eight checkpoints and the result
    assert kinds["sealed by the client"] == 3
    assert kinds["job.json"] == 1
    assert kinds["state.json"] >= 2 * len(ENDS)
    assert kinds["cut short by a crash"] < len(ENDS)
    assert not list((recording.enclave / "tmp").iterdir()) + list((recording.enclave / "cwd").iterdir())


def test_a_file_of_another_kind_is_noticed(recording, truth, tmp_path):
    """One that is not sealed, one that has more than what is sealed, one in another place, one with more words."""
    (job,) = (recording.enclave / "state" / "jobs").iterdir()
    sealed = next(kept for kept in recording.files if base(kept) == "result.sealed")
    plain, longer = tmp_path / "plain", tmp_path / "longer"
    plain.write_bytes(b"".join(checkpoint_as_bytes(truth.checkpoints[0]).values()))
    longer.write_bytes(sealed.path.read_bytes() + b"x")
    (tmp_path / "note").write_text('{"note":"the first label is 3","state":"running"}')
    folder = f"state/jobs/{job.name}"
    for path, name in (
        (plain, f"{folder}/checkpoint-00000001-00000001.sealed"),
        (plain, f"{folder}/state.json"),
        (plain, "tmp/masks"),
        (longer, f"{folder}/result.sealed"),
        (tmp_path / "note", f"{folder}/state.json"),
    ):
        with pytest.raises((AssertionError, TrustError, ValueError)):
            kind_of(recording, Kept(path, {name}))
    assert kind_of(recording, Kept(sealed.path, {f"{folder}/result.sealed"})) == "sealed by the enclave"


def test_a_file_that_lay_there_for_a_moment_is_kept_or_counted(tmp_path):
    folder = tmp_path / "folder"
    (folder / "new").mkdir(parents=True)
    (folder / "before").write_text("before")
    with Watch(folder, tmp_path / "attic") as watch:
        for number in range(50):
            path = folder / "new" / ".unfinished"
            path.write_text(str(number))
            path.replace(folder / "new" / "finished")
            (folder / "gone").write_text(str(number))
            (folder / "gone").unlink()
    texts = [kept.path.read_text() for kept in watch.files]
    assert len(texts) + watch.missed == 101
    assert texts.count("before") == 1
    assert texts.count("49") >= 1


def test_a_confined_process_writes_nowhere_else(tmp_path):
    """What the accounting rests on: of an enclave that could write elsewhere, not all files would be known."""
    if not can_confine():
        pytest.skip("this kernel has no Landlock, so an enclave may write elsewhere than we look")
    (tmp_path / "in").mkdir()
    for place, code in (("in", 0), ("out", 1)):
        command = f"import pathlib; pathlib.Path({str(tmp_path / place / 'file')!r}).write_text('x')"
        (tmp_path / "out").mkdir(exist_ok=True)
        confined = [*CONFINED, str(tmp_path / "in"), "--", sys.executable, "-c", command]
        ended = subprocess.run(confined, capture_output=True, text=True, check=False)
        assert ended.returncode == code
        assert ("PermissionError" in ended.stderr) == bool(code)


# --- nothing is found -------------------------------------------------------------------------------------------------
def content_of(recording, where):
    match where:
        case "disk":
            return b"".join(kept.path.read_bytes() for kept in recording.files)
        case "log":
            return (recording.enclave / "enclave.log").read_bytes() + "".join(recording.printed).encode()
        case "client wire":
            return streams(recording.to_client)
        case _:
            return streams(recording.to_workers)


@pytest.mark.parametrize("where", PLACES)
def test_nothing_is_found(recording, sought, where, figure):
    content = content_of(recording, where)
    least = {"disk": 5e5, "log": 500, "client wire": 1e5, "worker wire": 1e6}[where]
    assert least < len(content) < 20 * least, "not what such a job has to write or to say"
    found = scan(content, sought)
    words = f"{len(content) / 1e6:.2f} MB: {found}; by chance {found.false_alarm:.0e}"
    figure(f"no plaintext, {where}", words)
    assert not found.names, words
    assert found.false_alarm < 1e-9


@pytest.mark.parametrize("end", ["to_client", "to_workers"])
def test_every_byte_on_the_wire_is_tls_1_3_or_sealed(recording, end):
    """So what is not found by the search is not there in another form either, compressed for example."""
    conversations = [talk for talk in getattr(recording, end) if not talk.pipe]
    pipes = [talk for talk in getattr(recording, end) if talk.pipe]
    assert len(conversations) >= len(ENDS)
    assert bool(pipes) == (end == "to_workers")
    assert all(pipe_records(stream) for talk in pipes for stream in (talk.up, talk.down))
    for talk in conversations:
        for stream in (talk.up, talk.down):
            kinds = [kind for kind, _ in tls_records(stream)]
            rest = kinds[2:] if kinds[1:2] == [CHANGE_CIPHER] else kinds[1:]
            assert kinds[0] == HANDSHAKE
            assert set(rest) == {APPLICATION}
        assert hello_of(tls_records(talk.down)[0]).extensions[SUPPORTED_VERSIONS] == TLS13


# --- the same search finds it all, where it is ------------------------------------------------------------------------
def test_everything_is_found_in_plain_files(recording, truth, sought, figure):
    """What `darknight train` writes, its data, and the files of the keys."""
    files = [path for path in truth.folder.rglob("*") if path.is_file()]
    files += [recording.client / "data.npz", recording.client / "sealed.key", recording.host / "enclave" / KEY_FILE]
    found = scan(b"".join(path.read_bytes() for path in sorted(files)), sought)
    figure("no plaintext, control: files", str(found))
    assert found.names == ALL
    assert found.correlation > 0.99


def logged(lines):
    """As the enclave does, with line ends wherever a line is full."""
    file = io.StringIO()
    with messages_on(Console(file=file, highlight=False), LogLevel.INFO):
        for line in lines:
            logging.getLogger("darknight.enclave").info("%s", line)
    assert file.getvalue().count("INFO") > 0
    return file.getvalue().encode()


@pytest.mark.parametrize(
    "written",
    [
        bytes.hex,
        lambda key: key.hex().upper(),
        lambda key: f"x{key.hex()}",
        lambda key: base64.b64encode(key).decode(),
        lambda key: base64.urlsafe_b64encode(b"12" + key).decode(),
        repr,
        lambda key: str(list(key)),
    ],
    ids=["hex", "HEX", "odd hex", "base 64", "base 64 of more", "repr", "list"],
)
def test_a_key_in_a_log_line_is_found(recording, sought, written):
    keys = keys_of(recording)
    found = scan(content_of(recording, "log") + logged(f"the key is {written(key)}." for key in keys), sought)
    assert found.names == {"keys"}
    assert found.exact["keys"] >= len(keys) > 15


def test_labels_figures_and_images_in_a_log_line_are_found(recording, truth, sought):
    log, labels = content_of(recording, "log"), truth.data.train_y
    for line in (f"labels {labels.tolist()}", f"{labels[:20]}"):
        assert scan(log + logged([line]), sought).names == {"labels"}
    assert scan(log + logged([f"loss {truth.checkpoints[-1].epochs[0].loss}"]), sought).names == {"figures"}
    picture = np.array2string(truth.data.train_x[0].numpy(), threshold=10_000, precision=3)
    assert scan(log + logged([picture]), sought).names == {CORRELATION}


@pytest.mark.parametrize("form", ["<f4", "<f8", "<i4"])
def test_linearly_mixed_images_are_found_by_correlation_alone(sought, form, figure):
    """Two images in any combination without noise, in the middle of what looks like noise."""
    noise, found = np.random.default_rng(7), []
    for (one, two), angle in zip(combinations(sought.images, 2), np.linspace(0.1, 3, 10), strict=True):
        mixed = (np.cos(angle) * one + np.sin(angle) * two).numpy() * (1000 if form == "<i4" else 1)
        found.append(scan(noise.bytes(9_001) + mixed.astype(form).tobytes() + noise.bytes(9_001), sought))
        assert found[-1].names == {CORRELATION}
    figure(f"no plaintext, control: mixed, {form}", f"at least {min(each.correlation for each in found):.3f}")
    assert min(each.correlation for each in found) > THRESHOLD + 0.05


def in_the_clear(parts):
    """What a tap records of them if they are sent without TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server, Tap(f"127.0.0.1:{server.getsockname()[1]}") as tap:
        host, port = tap.address.split(":")
        with socket.create_connection((host, int(port))) as sender:
            _answering_nothing(sender, server.accept()[0], b"".join(parts))
    return bytes(tap.conversations[0].up)


def test_without_tls_progress_is_found_and_nothing_else(recording, sought, figure):
    """The same messages. TLS hides how far the job is; data, keys and the result are sealed inside it."""
    found = scan(in_the_clear(recording.said), sought)
    figure("no plaintext, control: no TLS", str(found))
    assert found.names == {"figures"}


def test_without_tls_and_seals_everything_is_found(recording, truth, sought):
    """The same messages, with what is sealed in them opened."""
    with np.load(recording.client / "data.npz") as arrays:
        parts = [arrays["x"].tobytes(), arrays["y"].tobytes()]
    parts += [*recording.result.values(), recording.job.keys.data.raw, recording.job.keys._job]
    parts += checkpoint_as_bytes(truth.checkpoints[3]).values()
    found = scan(in_the_clear([*recording.said, *parts]), sought)
    assert found.names == ALL - {"private keys"}


# --- crashes ----------------------------------------------------------------------------------------------------------
def test_a_crash_leaves_no_core(recording):
    """It was let leave one of any size. Nor may another process of the same account look into its memory."""
    assert [life.end.si_status for life in recording.lives] == list(ENDS)
    for life in recording.lives:
        assert life.end.si_code == os.CLD_KILLED, "the kernel says that it dumped a core"
        assert life.core == ["0", "0"]
        assert not life.read
    assert not [name for kept in recording.files for name in kept.names if "core" in name]


@pytest.mark.parametrize("how", [end for end in ENDS if end != signal.SIGKILL])
def test_a_process_without_the_switch_leaves_a_core_with_its_keys(recording, sought, tmp_path, how):
    """As confined as the enclave."""
    key = recording.job.keys.data.raw
    command = f"import sys, time; key = bytes.fromhex('{key.hex()}'); print(flush=True); time.sleep(600)"
    confined = [*CONFINED, str(tmp_path), "--", sys.executable, "-c", command]
    with subprocess.Popen(confined, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        process.stdout.readline()
        limits = core_limits(process.pid)
        assert can_be_read(process.pid)
        process.send_signal(how)
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert end.si_status == how
    if limits == ["0", "0"]:
        pytest.skip("on this machine nobody's processes leave cores")
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if not pattern or pattern[0] in "|/":
        pytest.skip("this machine's cores go to a program or a folder of their own, where they are not looked for")
    assert end.si_code == os.CLD_DUMPED
    (core,) = tmp_path.iterdir()
    assert key[:16] in core.read_bytes()
