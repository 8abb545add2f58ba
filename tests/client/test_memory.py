"""Sets larger than the memory that sealing them takes."""

import subprocess
import sys
import textwrap
import zipfile

import numpy as np
import pytest

from cli.command import clean_environment

LIMIT = 300e6  # bytes that are resident at most, of the whole process: Python, PyTorch and all
GROWTH = 40e6  # of these for the sealing itself; the rest is there before it begins
SIDE, SMALL = 224, 32  # of colour images: 150 kB each, and 3 kB

# What the kernel says of the process itself: ru_maxrss would begin with the memory of whoever started it.
RUN = textwrap.dedent(
    """
    import sys
    {load}

    def peak():
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

    before = peak()
    {do}
    print(before, peak())
    """
)
COMMAND = RUN.format(
    load="from darknight.cli.app import run; import darknight.cli.seal",
    do="assert run(['seal', sys.argv[1], '--out', sys.argv[2], '--json']) == 0, 'failed'",
)
LIBRARY = RUN.format(
    load="from pathlib import Path; from darknight.client.seal import *; from darknight.data import read_dataset",
    do=(
        "to = Destination(folder=Path(sys.argv[2]), key=key_beside(Path(sys.argv[2])))\n"
        "seal_dataset(read_dataset(sys.argv[1], seed=0), to, progress=lambda more: None)"
    ),
)
WHOLE = LIBRARY.replace(
    "to = Dest", "data = read_dataset(sys.argv[1], seed=0)\ndata.train.source.read(data.train.chosen)\nto = Dest"
)


def make_npz(path, images, *, side=SIDE, labelled=True):
    """As large as wanted, without ever being in memory: the same block of noise again and again."""
    block = np.random.default_rng(0).integers(0, 256, (20, side, side, 3), dtype=np.uint8).tobytes()
    members = [("x", f"({images}, {side}, {side}, 3)", block, images // 20)]
    if labelled:
        members.append(("y", f"({images},)", b"\0\1" * 10, images // 20))
    with zipfile.ZipFile(path, "w") as archive:
        for name, shape, content, times in members:
            text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text)
                for _ in range(times):
                    member.write(content)
    return path


def make_cifar(folder, images):
    """Sparse files: black images with the label 0."""
    folder.mkdir()
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        with open(folder / name, "wb") as file:
            file.truncate(3073 * (images // 5 if "data" in name else 100))
    return folder


def peak_of(program, source, folder):
    """Bytes before and at most, of a process that seals `source`."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(source), str(folder)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    before, most = map(int, done.stdout.split()[-2:])
    return before, most


def test_the_size_of_a_set_does_not_matter(tmp_path, full, figure):
    """2 GB with --full, 150 MB otherwise; and who reads a set as a whole does not keep to it."""
    images = 13_400 if full else 1000
    source = make_npz(tmp_path / "set.npz", images)
    before, most = peak_of(COMMAND, source, tmp_path / "sealed")
    assert (tmp_path / "sealed" / "records").stat().st_size > images * 150_000
    assert most < LIMIT
    assert most - before < GROWTH
    figure(
        "sealing, memory", f"{most / 1e6:.0f} MB for {images * 0.150528:.0f} MB, {before / 1e6:.0f} MB before it began"
    )
    if not full:
        before, most = peak_of(WHOLE, source, tmp_path / "whole")
        assert most - before > images * 150_000


@pytest.mark.full
@pytest.mark.parametrize("kind", ["cifar", "npz", "npz without labels"])
def test_neither_do_half_a_million_labels(tmp_path, figure, kind):
    """2 GB in small images, by the command. Of each example there is its label and its place in memory."""
    if kind == "cifar":
        source = make_cifar(tmp_path / "cifar", 660_000)
    else:
        source = make_npz(tmp_path / "set.npz", 660_000, side=SMALL, labelled=kind == "npz")
    before, most = peak_of(COMMAND, source, tmp_path / "sealed")
    figure(f"sealing, {kind} of small images", f"{most / 1e6:.0f} MB for 2 GB, {before / 1e6:.0f} MB before it began")
    assert most < LIMIT
    assert most - before < GROWTH
