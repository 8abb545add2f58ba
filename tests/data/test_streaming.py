"""Sets larger than the memory that a process may have."""

import subprocess
import sys
import textwrap
import zipfile

IMAGES = 50_000  # of 3,072 bytes: 146 MiB
ROOM = 48  # MiB on top of what Python and PyTorch take

READ = textwrap.dedent(
    """
    import resource, sys
    import torch
    from darknight.data import read_dataset

    def data_bytes():
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (int(sys.argv[1]) << 20),) * 2)
    generator = torch.Generator().manual_seed(0)
    for source in sys.argv[2:]:
        data = read_dataset(source, seed=0)
        seen = 0
        for part in (data.train, data.test):
            for indices in torch.split(torch.randperm(len(part), generator=generator), 256):
                seen += len(part.examples(indices))
        print(data.name, seen)
        try:
            data.train.source.read(torch.arange(len(data.train)))
        except MemoryError:
            print("not whole")
    """
)


def make_cifar(folder):
    """Sparse files: black images with the label 0."""
    folder.mkdir()
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        with open(folder / name, "wb") as file:
            file.truncate(3073 * (IMAGES // 5 if "data" in name else 100))
    return str(folder)


def make_npz(path):
    pixels = (b"\7" * 3072 * 1000 for _ in range(IMAGES // 1000))
    members = (("x", f"({IMAGES}, 32, 32, 3)", pixels), ("y", f"({IMAGES},)", [b"\1" * IMAGES]))
    with zipfile.ZipFile(path, "w") as archive:
        for name, shape, pieces in members:
            text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
            with archive.open(f"{name}.npy", "w") as member:
                member.write(b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text)
                for piece in pieces:
                    member.write(piece)
    return str(path)


def test_sets_of_three_times_the_memory_are_read_in_batches(tmp_path):
    """And whoever reads one whole has not enough, or this would show nothing."""
    paths = make_cifar(tmp_path / "cifar"), make_npz(tmp_path / "set.npz")
    done = subprocess.run([sys.executable, "-c", READ, str(ROOM), *paths], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"cifar10 {IMAGES + 100}",
        "not whole",
        f"set.npz {IMAGES}",
        "not whole",
    ]
