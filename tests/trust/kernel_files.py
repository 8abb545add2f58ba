"""Simulation of the files that a kernel or Gramine offers inside a TEE, over an ordinary folder.

A path whose folders fill themselves with the kernel's files when they are made, and whose quote is made when it is
opened, from what was written before. Everything else is the real file system.
"""

from pathlib import PosixPath

ATTRIBUTES = ("inblob", "outblob", "provider", "generation", "auxblob")


class SimulatedTsm(PosixPath):
    """/sys/kernel/config/tsm/report, simulated. Set `kernel` to a Kernel first."""

    kernel = None

    def mkdir(self, *arguments, **named):
        super().mkdir(*arguments, **named)
        for name in self.kernel.attributes:
            (self / name).touch()

    def rmdir(self):
        self.kernel.removed.append(self.name)
        for path in list(self.iterdir()):
            path.unlink()
        super().rmdir()

    def open(self, mode="r", *arguments, **named):
        if "r" in mode and self.name in self.kernel.attributes:
            self.write_bytes(self.kernel.content(self.name, (self.parent / "inblob").read_bytes()))
        return super().open(mode, *arguments, **named)

    def write_bytes(self, data):
        with PosixPath(self).open("wb") as file:
            return file.write(data)

    def read_bytes(self):
        with PosixPath(self).open("rb") as file:
            return file.read()


class Kernel:
    """What the simulated kernel answers. quote: a function of the 64 bytes; the rest as bytes."""

    def __init__(self, quote, *, provider=b"sev_guest\n", generation=b"1\n", auxblob=b"", attributes=ATTRIBUTES):
        self.quote, self.attributes, self.removed = quote, attributes, []
        self.answers = {"provider": provider, "generation": generation, "auxblob": auxblob}

    def content(self, name, inblob):
        if name == "outblob":
            return self.quote(inblob)
        return self.answers.get(name, inblob)


class SimulatedGramine(PosixPath):
    """/dev/attestation, simulated: the quote is made from user_report_data when it is opened."""

    quote = None

    def open(self, mode="r", *arguments, **named):
        if self.name == "quote":
            data = PosixPath(self.parent / "user_report_data").read_bytes()
            PosixPath(self).write_bytes(type(self).quote(data))
        return super().open(mode, *arguments, **named)
