"""From the data holder's laptop to the trained model, on one machine, with every command as you would type it.

Evidence is SIMULATED here, and all workers are in one hand: it shows how things go, and protects nothing.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

DARKNIGHT = Path(sys.executable).with_name("darknight")
OPERATORS = ("north", "south", "west")
EPOCHS, STEPS = 4, 4 * 23
HALF = STEPS // 2

JOB = f"""\
kind = "train"
output = "result"
policy = "policy.toml"
save_every = 1.0

[data]
sealed = "digits.sealed"
key = "digits.sealed.key"

[model]
name = "small-cnn"

[recipe]
epochs = {EPOCHS}
batch_size = 64
learning_rate = 0.05

[scheme]
inputs = 1
colluders = 1
"""


def main(folder: Path) -> int:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    begin = time.monotonic()
    with ExitStack() as stack:
        title("1. The data holder seals its data. The key stays with it; the folder may go anywhere.")
        run(folder, "seal", "digits", "--out", "digits.sealed")

        title("2. Three operators start workers. Nobody trusts them.")
        run(folder, "fleet", "identity", "--out", "enclave")
        entries = [stack.enter_context(worker(folder, operator)) for operator in OPERATORS]
        (folder / "fleet.toml").write_text("\n".join(entries))

        title("3. Somebody runs an enclave on a machine that the data holder does not own. (SIMULATED evidence.)")
        policy = policy_of(folder)
        (folder / "policy.toml").write_text(policy)
        say("The data holder's policy, which says what program may have the keys:", policy)
        address, first = start_enclave(folder, stack)

        title("4. The data holder submits a job: the enclave proves what it is, and gets the keys.")
        (folder / "job.toml").write_text(JOB)
        submitted = start(folder, "submit", "job.toml", "--to", address, "--yes", keep=False)
        stack.callback(end, submitted)
        wait_for_half(folder, submitted)

        title(f"5. kill -9: the enclave dies half way, at step {newest_step(folder)} of {STEPS}. Its keys die with it.")
        first.send_signal(signal.SIGKILL)
        first.wait()
        time.sleep(2)

        title("6. It is started again. The client verifies it anew, and releases keys for the newest checkpoint.")
        start_enclave(folder, stack, address)
        if submitted.wait() != 0:
            return 1

        title("7. The result was decrypted on the data holder's machine. It predicts:")
        run(folder, "infer", "--checkpoint", "result/model.safetensors", "--data", "digits", "--output", "digits.csv")
    say(f"\nDone in {time.monotonic() - begin:.0f} seconds. Everything is in {folder}.")
    return 0


# --- commands ---------------------------------------------------------------------------------------------------------
def run(folder: Path, *arguments: str) -> None:
    """As a user types it; the tour ends if it fails."""
    show(arguments)
    if code := subprocess.run([DARKNIGHT, *arguments], cwd=folder).returncode:
        raise SystemExit(code)


def start(folder: Path, *arguments: str, keep: bool = True) -> subprocess.Popen[str]:
    """In the background; keep: what it prints is for us to read."""
    show(arguments, background=True)
    return subprocess.Popen([DARKNIGHT, *arguments], cwd=folder, stdout=subprocess.PIPE if keep else None, text=True)


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def worker(folder: Path, operator: str) -> Iterator[str]:
    """Gives the entry that it prints for the fleet file."""
    flags = ("--listen", "127.0.0.1:0", "--operator", operator, "--state", operator, "--log-level", "error")
    process = start(folder, "worker", *flags, "--allow-enclave", "enclave/certificate.pem")
    said = ""
    while said.count("'''") < 2:
        said += line_of(process)
    try:
        yield said[said.index("[[worker]]") :]
    finally:
        end(process)


def policy_of(folder: Path) -> str:
    arguments = ("enclave", "--fleet", "fleet.toml", "--insecure-simulated-platform", "platform", "--show", "--json")
    show(arguments)
    shown = subprocess.run([DARKNIGHT, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    measurement = json.loads(shown.stdout)["measurement"]
    return f'measurements = ["{measurement}"]\ninsecure_simulated_root = "platform/simulated-root.pem"\n'


def start_enclave(folder: Path, stack: ExitStack, address: str = "127.0.0.1:0") -> tuple[str, subprocess.Popen[str]]:
    process = start(
        folder,
        *("enclave", "--fleet", "fleet.toml", "--listen", address, "--json", "--log-level", "error"),
        *("--insecure-simulated-platform", "platform"),
    )
    stack.callback(end, process)
    return json.loads(line_of(process))["address"], process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"it ended with {process.wait()}")
    return line


# --- what happens meanwhile -------------------------------------------------------------------------------------------
def newest_step(folder: Path) -> int:
    try:
        step: int = json.loads((folder / "result" / "receipts.json").read_bytes())["step"]
    except FileNotFoundError:
        return 0
    return step


def wait_for_half(folder: Path, submitted: subprocess.Popen[str]) -> None:
    while newest_step(folder) < HALF:
        if submitted.poll() is not None:
            raise SystemExit(f"the job ended too early ({submitted.returncode})")
        threading.Event().wait(0.1)


def show(arguments: tuple[str, ...], *, background: bool = False) -> None:
    say(f"$ darknight {' '.join(arguments)}{' &' if background else ''}")


def title(text: str) -> None:
    say("", text, "")


def say(*lines: str) -> None:
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "darknight-tour").absolute()))
