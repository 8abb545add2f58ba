"""Files that were damaged at random are read, or refused with a DataError that names them. Nothing else happens."""

import random

import pytest

from darknight.errors import DataError
from data import makers

# Tenths of the count: both sets of CIFAR are one format each way, and CIFAR-10 has six files to read.
SHARES = {"cifar10-python": 2, "cifar100-python": 8, "cifar10-binary": 2, "cifar100-binary": 8}


def damaged(content, draw):
    """One to three of: cut short, some bytes changed, a piece taken out, a piece put in, a piece repeated."""
    content = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 3))):
        # Headers and ends are where structure is; pixels in between may be anything.
        near = draw.choice((16, 64, 400, len(content)))
        at = draw.randrange(min(near, len(content)) or 1)
        at = at if draw.random() < 0.5 else max(0, len(content) - 1 - at)
        kind = draw.randrange(6)
        if kind == 0:
            del content[at:]
        elif kind == 1:
            del content[at : at + draw.choice((1, 4, 100))]
        elif kind == 2:
            content[at:at] = draw.randbytes(draw.choice((1, 4, 100)))
        elif kind == 3:
            content[at:at] = content[at : at + draw.choice((1, 30, 1000))]
        else:
            for place in range(at, min(at + draw.choice((1, 1, 2, 4, 8)), len(content))):
                content[place] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, content[place] ^ 1 << draw.randrange(8)))
    return bytes(content)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", makers.MAKERS)
def test_damaged_files_are_read_or_refused(name, tmp_path, full, one_thread):
    settings = {"image_size": 8} if name in ("png", "jpeg") else {}
    made = makers.MAKERS[name](tmp_path / "set")
    makers.read_all(made.source, **settings)
    paths = [made.path] if made.path.is_file() else sorted(path for path in made.path.rglob("*") if path.is_file())
    whole = {path: path.read_bytes() for path in paths}
    draw, complaints = random.Random(name), []
    count = (10_000 if full else 500) * SHARES.get(name, 10) // 10
    for _ in range(count):
        path = draw.choice(paths)
        path.write_bytes(damaged(whole[path], draw))
        try:
            makers.read_all(made.source, **settings)
        except DataError as error:
            complaints.append(str(error))
        finally:
            path.write_bytes(whole[path])
    assert len(complaints) > count // 5
    assert not [complaint for complaint in complaints if made.path.name not in complaint]
