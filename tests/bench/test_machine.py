"""What is kept about a machine: enough to compare, nothing that names it."""

import getpass
import json
import socket
import subprocess

from darknight import __version__
from darknight.bench import machine, program


def test_the_same_every_time_and_without_names():
    assert machine() == machine()
    assert machine().keys() == {"processor", "cores", "memory_gib", "system", "large_pages"}
    words = json.dumps([machine(), program()])
    assert socket.gethostname() not in words
    assert f'"{getpass.getuser()}"' not in words


def test_the_program_has_a_version_and_where_it_can_a_commit(monkeypatch):
    found = program()
    assert found["version"] == __version__
    assert isinstance(found["compiled_kernels"], bool)

    def no_git(*given, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert program()["commit"] is None
