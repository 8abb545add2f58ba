"""darknight submit: the flags, and what is shown of a job in an enclave."""

from __future__ import annotations

from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from darknight.cli.messages import LogLevel, messages_on, option
from darknight.cli.progress import Display, display_on
from darknight.cli.trust_table import trust_table
from darknight.client.conversation import Conversation
from darknight.client.job_file import read_job_file
from darknight.client.job_folder import JobFolder
from darknight.client.jobs import Place, cancel, fetch, status_of, submit, write_result
from darknight.errors import ServiceError, UsageError
from darknight.train import Epoch, Progress
from darknight.trust.policy import read_policy

_ENCLAVE, _OUTPUT = "Enclave", "Output"
_ACTIONS = ("status", "cancel", "fetch")
_WORDS = "[status|cancel|fetch] JOB.toml"


def submit_command(
    words: Annotated[
        list[str], typer.Argument(metavar=_WORDS, show_envvar=False, help="What to do, and the job file.")
    ],
    to: Annotated[str, option(_ENCLAVE, "Address of the enclave, HOST:PORT.", "--to")] = "127.0.0.1:7700",
    yes: Annotated[
        bool, option(_ENCLAVE, "Accept an enclave that fits the policy without being asked.", "--yes")
    ] = False,
    patience: Annotated[float, option(_ENCLAVE, "Seconds to wait for an enclave that is gone.")] = 300.0,
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object at the end.", "--json")] = False,
    log_level: Annotated[LogLevel, option(_OUTPUT, "What is logged to stderr.")] = LogLevel.WARNING,
) -> None:
    """Submit a job to an enclave: verify what it is, release keys to it, watch, and fetch the result.

    The evidence is checked against the job's policy on this machine's clock. What is trusted is shown, and you are
    asked, once. Then the sealed data go there, the keys are released to that enclave alone, and you see how far it is.
    The result is decrypted here, into the job's output folder.

    Ctrl-C leaves the job running: the same command goes on watching. If the enclave is restarted it is verified again,
    and keys are released only for the newest checkpoint that it confirmed.

    Example:

        darknight submit job.toml --to enclave.example.org:7700

        darknight submit status job.toml --to enclave.example.org:7700

    The other actions are cancel, and fetch, which gets the result of a job that is finished.

    Exit codes: 0 done, 1 refused, failed or not reachable, 2 bad usage, 130 interrupted.
    """
    action, path = _understood(words)
    console = Console(stderr=True, highlight=False, emoji=False)
    with messages_on(console, log_level), display_on(console) as display:
        file = read_job_file(path)
        place = Place(address=to, policy=read_policy(file.policy), patience=patience)
        folder = JobFolder.open(file)
        watcher = _Screen(console, display, yes=yes)
        found: dict[str, Any]
        if action in ("submit", "fetch"):
            files = (submit if action == "submit" else fetch)(folder, place, watcher)
            found = {"job": folder.text.name, "files": [str(each) for each in write_result(folder, files)]}
        else:
            found = (status_of if action == "status" else cancel)(folder, place, watcher)
    if json:
        print(dumps(found, indent=2))
    elif "files" in found:
        print("\n".join(found["files"]))
    else:
        print(_printable(f"job {found['job']} is {found['state']}{': ' if found['note'] else ''}{found['note']}"))


def _understood(words: list[str]) -> tuple[str, Path]:
    if len(words) == 1 and words[0] not in _ACTIONS:
        return "submit", Path(words[0])
    if len(words) == 2 and words[0] in _ACTIONS:
        return words[0], Path(words[1])
    raise UsageError(f"darknight submit {' '.join(words)}: write {_WORDS}.")


def _printable(text: str) -> str:
    """What an enclave says, without signs that would steer the terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


class _Screen:
    """A `client.Watcher` on the terminal."""

    def __init__(self, console: Console, display: Display, *, yes: bool) -> None:
        self._console, self._display, self._yes = console, display, yes
        self._training: Progress | None = None
        self._silent = False
        self._done = 0

    def confirm(self, conversation: Conversation) -> bool:
        self._console.print(trust_table(conversation))
        if self._yes:
            return True
        if not self._console.is_terminal:
            raise UsageError("nobody is here to accept this enclave. Say --yes if it is the one of your policy.")
        return typer.confirm("Release the keys of your data to this enclave?", err=True)

    def sending(self, name: str, size: int) -> Callable[[int], None]:
        self._say(f"sending {name}, {size:,} bytes")
        return lambda number: None

    def lost(self, error: ServiceError) -> None:
        if not self._silent:
            self._say(f"{error} Waiting for it.")
        self._silent = True

    def event(self, words: dict[str, Any]) -> None:
        self._silent = False
        kind = words.get("kind")
        if kind == "state":
            self._say(f"the job is {words['state']}{': ' if words.get('note') else ''}{words.get('note', '')}")
        elif kind == "started":
            self._training = self._display.training("enclave")
            self._training.started(epochs=words["epochs"], steps=words["steps"], done=words["done"])
            if words["done"]:
                self._say(f"it goes on after step {words['done']} of {words['steps']}")
        elif kind == "step" and self._training is not None:
            self._training.step(
                epoch=words["epoch"], step=words["step"], loss=words["loss"], learning_rate=words["learning_rate"]
            )
        elif kind == "epoch" and self._training is not None:
            names = ("number", "loss", "accuracy", "seconds")
            self._training.epoch(Epoch(**{name: words[name] for name in names}))
        elif kind == "integrity":
            evidence = words["evidence"]
            self._say(f"worker {evidence['worker']} lied and is out: {evidence['finding']}")
        elif kind == "predicted":
            self._say(f"{words['done']:,} of {words['examples']:,} examples")

    def _say(self, text: str) -> None:
        self._console.print(_printable(text), markup=False, soft_wrap=True)
