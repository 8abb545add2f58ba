"""The Ray engine on a real Ray of two actors: the same results as one device, also when actors die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import warm
from darknight.errors import OpError, UsageError
from darknight.ops import BilinearOp, Conv, Linear
from darknight.types import BackwardTask, Expected, ForwardTask, Pass, Weights
from darknight.wire import Link
from darknight.wire.grpc_link import connect
from darknight.wire.identity import ENCLAVE, Identity
from darknight.worker.engine import LocalEngine
from darknight.worker.ray_engine import RayEngine

if find_spec("ray") is None:  # not imported here: the engine must be the first to do so
    pytest.skip("Ray is not installed (the extra ray)", allow_module_level=True)

PRIME = 268435399
LOCAL = LocalEngine()
ray: Any = None
LAYERS: dict[str, tuple[BilinearOp, tuple[int, ...], tuple[int, ...]]] = {
    "conv": (Conv.make((3, 3), stride=2, padding=1, groups=2), (4, 7, 6), (6, 2, 3, 3)),
    "linear": (Linear(), (3, 40), (11, 40)),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[RayEngine]:
    global ray
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    found = RayEngine(actors=2, object_store=200 * 2**20)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    ray = import_module("ray")
    # What the tests define travels as code: actors cannot import a test file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        yield found
    finally:
        processes = descendants(os.getpid(), without=warm.own_process())
        found.close()
        found.close()
        op, feature, w_shape = LAYERS["linear"]
        x, w, _ = operands(op, (5, *feature), w_shape, torch.int32)
        with pytest.raises(OpError, match="left its cluster"):
            found.forward(weights_of(op, w, PRIME), op, x)
        assert not ray.is_initialized()
        wait_until(lambda: not any(map(alive, processes)), "Ray's processes to end")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def descendants(pid: int, without: int | None = None) -> list[int]:
    try:
        tasks = [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
        children = [int(c) for t in tasks for c in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
    except FileNotFoundError:
        return []
    children = [child for child in children if child != without]
    return children + [further for child in children for further in descendants(child)]


def operands(op: BilinearOp, x_shape: tuple[int, ...], w_shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    shapes = (x_shape, w_shape, op.output_shape(x_shape, w_shape))
    source = torch.Generator().manual_seed(7)
    if dtype == torch.int32:
        return [torch.randint(0, PRIME, shape, generator=source, dtype=dtype) for shape in shapes]
    return [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes]


def weights_of(op: BilinearOp, tensor: Tensor, prime: int | None) -> Weights:
    return Weights(layer="net.0", version=1, op=op.spec(), prime=prime, tensor=tensor)


@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_field_gives_the_bits_of_one_device(engine: RayEngine, layer: str, groups: int) -> None:
    op, feature, w_shape = LAYERS[layer]
    x, w, delta = operands(op, (groups, *feature), w_shape, torch.int32)
    weights, x_shape = weights_of(op, w, PRIME), tuple(x.shape)
    for found, needed in (
        (engine.forward(weights, op, x), LOCAL.forward(weights, op, x)),
        (engine.grad_input(weights, op, delta, x_shape), LOCAL.grad_input(weights, op, delta, x_shape)),
        (engine.grad_weight(weights, op, x, delta), LOCAL.grad_weight(weights, op, x, delta)),
    ):
        assert found.dtype == needed.dtype
        assert torch.equal(found, needed)
        found.zero_()  # memory of its own: Ray's is read-only


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", LAYERS)
def test_floats_are_summed_in_float64_and_rounded_once(engine: RayEngine, layer: str, dtype: torch.dtype) -> None:
    op, feature, w_shape = LAYERS[layer]
    x, w, delta = operands(op, (5, *feature), w_shape, dtype)
    # Two slices that cancel: a partial gradient rounded to float32 before the sum would lose what is left.
    x[3:5], delta[3:5] = x[:2], -delta[:2]
    delta[2] *= 1e-6
    weights, x_shape = weights_of(op, w, None), tuple(x.shape)
    close = {"rtol": 1e-6, "atol": 1e-9} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(engine.forward(weights, op, x), LOCAL.forward(weights, op, x), **close)
    found = engine.grad_input(weights, op, delta, x_shape)
    torch.testing.assert_close(found, LOCAL.grad_input(weights, op, delta, x_shape), **close)
    found = engine.grad_weight(weights, op, x, delta)
    torch.testing.assert_close(found, LOCAL.grad_weight(weights, op, x, delta), **close)
    assert found.dtype == dtype


def test_one_gradient_comes_back(engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    op, feature, w_shape = LAYERS["linear"]
    x, w, delta = operands(op, (5, *feature), w_shape, torch.int32)
    weights = weights_of(op, w, PRIME)
    fetched: list[tuple[int, ...]] = []
    get = ray.get

    def spying(refs: Any, **settings: Any) -> Any:
        found = get(refs, **settings)
        fetched.extend(a.shape for a in (found if isinstance(found, list) else [found]) if isinstance(a, np.ndarray))
        return found

    monkeypatch.setattr(ray, "get", spying)
    engine.grad_weight(weights, op, x, delta)
    assert fetched == [w_shape]
    fetched.clear()
    engine.forward(weights, op, x)
    assert fetched == [(3, 3, 11), (2, 3, 11)]  # two actors had a part of it


def test_weights_are_put_once_and_freed_when_forgotten(engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    op, size = Linear(), 16 * 2**20
    weights = weights_of(op, torch.ones(2048, 2048, dtype=torch.int32), PRIME)
    x = torch.ones(2, 2048, dtype=torch.int32)
    used = store_bytes()
    puts = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value.shape) or put(value))
    for _ in range(3):
        engine.forward(weights, op, x)
    engine.grad_input(weights, op, x, (2, 2048))
    assert puts == [(2048, 2048)]
    wait_until(lambda: 0.9 * size < store_bytes() - used < 1.5 * size, "the weights to be in the store")
    engine.forget(weights)
    wait_until(lambda: store_bytes() - used < 0.5 * size, "forgotten weights to be freed")
    other = weights_of(op, torch.full((2048, 2048), 2, dtype=torch.int32), PRIME)  # the same layer and version
    assert engine.forward(other, op, x).unique().tolist() == [4096]
    del other  # a session that ended without a word
    wait_until(lambda: store_bytes() - used < 0.5 * size, "dropped weights to be freed")


def store_bytes() -> int:
    (node,) = ray.nodes()
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    stats = import_module("ray._private.internal_api").node_stats(*address, include_memory_info=False)
    return int(stats.store_stats.object_store_bytes_used)


# --- actors that die -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Stalling(Linear):
    """A linear layer that says who computes it, and waits for leave the first time."""

    folder: str = ""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        self._stall()
        return super().forward(x, w)

    def grad_weight(self, x: Tensor, delta: Tensor, w_shape: tuple[int, ...]) -> Tensor:
        self._stall()
        return super().grad_weight(x, delta, w_shape)

    def _stall(self) -> None:
        Path(self.folder, f"pid-{os.getpid()}").touch()
        while not Path(self.folder, "go").exists():
            time.sleep(0.01)


def in_the_middle(
    engine: RayEngine, folder: Path, compute: Callable[[Stalling], Tensor], do: Callable[[], None]
) -> Tensor:
    """What `compute` gives, when `do` is done while both actors compute."""
    results: list[Tensor | BaseException] = []

    def run() -> None:
        try:
            results.append(compute(Stalling(folder=str(folder))))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: len(list(folder.glob("pid-*"))) == 2, "both actors to compute")
        do()
    finally:
        (folder / "go").touch()
        thread.join(180)  # longer than the engine's patience
    assert not thread.is_alive()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def pids_in(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def both_work(engine: RayEngine) -> bool:
    return len(engine._crew.ready()) == engine.actors == 2


@pytest.mark.parametrize(
    ("how", "kind", "dtype"),
    [
        ("SIGKILL", "forward", torch.int32),
        ("both", "grad_weight", torch.float32),
        pytest.param("ray.kill", "grad_weight", torch.float32, marks=pytest.mark.full),
        pytest.param("ray.kill", "forward", torch.int32, marks=pytest.mark.full),
        pytest.param("SIGKILL", "grad_weight", torch.int32, marks=pytest.mark.full),
        pytest.param("both", "forward", torch.float32, marks=pytest.mark.full),
        pytest.param("both", "grad_weight", torch.int32, marks=pytest.mark.full),
    ],
)
def test_a_killed_actor_changes_nothing(
    engine: RayEngine, tmp_path: Path, how: str, kind: str, dtype: torch.dtype
) -> None:
    op, feature, w_shape = LAYERS["linear"]
    x, w, delta = operands(op, (5, *feature), w_shape, dtype)
    weights = weights_of(op, w, PRIME if dtype == torch.int32 else None)
    wait_until(lambda: both_work(engine), "two actors")

    def kill() -> None:
        if how == "ray.kill":
            ray.kill(engine._crew.ready()[0])
        else:
            for pid in pids_in(tmp_path)[: 2 if how == "both" else 1]:
                os.kill(pid, signal.SIGKILL)

    def compute(stalling: BilinearOp) -> Tensor:
        if kind == "forward":
            return engine.forward(weights, stalling, x)
        return engine.grad_weight(weights, stalling, x, delta)

    undisturbed = compute(op)
    assert torch.equal(in_the_middle(engine, tmp_path, compute, kill), undisturbed)
    if how != "both":
        assert len(pids_in(tmp_path)) == 2  # the slice went to the actor that was left, without waiting for a new one
    wait_until(lambda: both_work(engine), "the dead to be replaced")


@pytest.mark.full
def test_an_actor_that_hangs_is_given_up(engine: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op, feature, w_shape = LAYERS["linear"]
    x, w, _ = operands(op, (5, *feature), w_shape, torch.int32)
    weights = weights_of(op, w, PRIME)
    wait_until(lambda: both_work(engine), "two actors")
    monkeypatch.setattr(engine, "_patience", 1.0)
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(pids_in(tmp_path)[0])
        os.kill(stopped[0], signal.SIGSTOP)
        (tmp_path / "go").touch()

    try:
        found = in_the_middle(engine, tmp_path, lambda stalling: engine.forward(weights, stalling, x), stop)
        assert torch.equal(found, LOCAL.forward(weights, op, x))
        wait_until(lambda: both_work(engine), "the one that hangs to be replaced")
        assert not alive(stopped[0])
    finally:
        if stopped and alive(stopped[0]):
            os.kill(stopped[0], signal.SIGCONT)


def test_without_actors_the_refusal_is_in_words_and_they_are_used_when_they_come(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, feature, w_shape = LAYERS["linear"]
    x, w, _ = operands(op, (5, *feature), w_shape, torch.int32)
    weights, crew = weights_of(op, w, PRIME), engine._crew
    wait_until(lambda: both_work(engine), "two actors")
    with monkeypatch.context() as patch:
        patch.setattr(crew, "_recipe", ray.remote(Hopeless).options(num_cpus=10_000))
        patch.setattr(crew, "_patience", 0.5)
        for actor in crew.ready():
            ray.kill(actor)
        with pytest.raises(OpError, match="no actor can be had"):
            engine.forward(weights, op, x)
    crew.close()
    assert torch.equal(engine.forward(weights, op, x), LOCAL.forward(weights, op, x))


class Hopeless:
    def __init__(self, gpu: bool) -> None:
        pass

    def ready(self) -> None:
        pass


# --- refusals and the machine ----------------------------------------------------------------------------------------
def test_what_does_not_fit_is_refused_as_by_one_device(engine: RayEngine) -> None:
    op, feature, w_shape = LAYERS["linear"]
    x, w, delta = operands(op, (5, *feature), w_shape, torch.int32)
    weights = weights_of(op, w, PRIME)
    with pytest.raises(OpError, match="linear: input"):
        engine.forward(weights, op, x[..., 1:])
    with pytest.raises(OpError, match="does not belong"):
        engine.grad_input(weights, op, delta, (4, *feature))
    with pytest.raises(OpError, match="does not belong"):
        engine.grad_weight(weights, op, x[:4], delta)


@dataclass(frozen=True)
class Failing(Linear):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        raise RuntimeError("out of memory\nand a long story")


def test_a_task_that_fails_is_refused_once_and_its_actor_lives_on(engine: RayEngine) -> None:
    op, feature, w_shape = LAYERS["linear"]
    x, w, _ = operands(op, (5, *feature), w_shape, torch.int32)
    wait_until(lambda: both_work(engine), "two actors")
    before = engine._crew.ready()
    with pytest.raises(OpError, match=r"^ray: an actor failed with RuntimeError\. out of memory\.$"):
        engine.forward(weights_of(op, w, PRIME), Failing(), x)
    assert engine._crew.ready() == before


def test_what_ray_itself_raises_becomes_a_refusal(engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    op, feature, w_shape = LAYERS["linear"]
    x, w, delta = operands(op, (5, *feature), w_shape, torch.int32)
    weights = weights_of(op, w, PRIME)

    def full(*_: object, **__: object) -> None:
        raise ray.exceptions.ObjectStoreFullError("no space\nand a long story")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(OpError, match="ObjectStoreFullError"):
        engine.forward(weights, op, x)
    with pytest.raises(OpError, match="ObjectStoreFullError"):
        engine.grad_input(weights, op, delta, tuple(x.shape))
    monkeypatch.setattr(ray, "wait", full)
    with pytest.raises(OpError, match="ObjectStoreFullError"):
        engine.grad_weight(weights, op, x, delta)


def test_more_actors_than_devices_are_refused(engine: RayEngine) -> None:
    with pytest.raises(UsageError, match=r"1000 actors; the Ray cluster has \d+ CPU slots"):
        RayEngine(address="auto", actors=1000)
    assert ray.is_initialized()  # the cluster of another engine was left alone


def test_ray_of_our_own_listens_on_loopback_only(engine: RayEngine) -> None:
    sockets = {
        os.readlink(link)
        for pid in [os.getpid(), *descendants(os.getpid())]
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink()
    }
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                listening.append(fields[1].split(":")[0])
    assert len(listening) >= 4
    assert set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'ray>=2\.50'"):
        RayEngine(address="127.0.0.1:1")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_a_cluster_that_is_not_there_is_refused_at_once(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would try for minutes"))
    with pytest.raises(UsageError, match=f"no Ray cluster could be had at {address}"):
        RayEngine(address=address)


def test_ray_client_is_refused(engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UsageError, match="Run the worker on a node"):
        RayEngine(address="ray://127.0.0.1:10001")


# --- the program ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("number", "code", "starved"),
    [
        pytest.param(signal.SIGTERM, 0, False, id="asked"),
        pytest.param(signal.SIGTERM, 0, True, id="asked, Ray starved", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, False, id="killed", marks=pytest.mark.full),
    ],
)
def test_a_worker_with_ray_serves_an_enclave_and_leaves_no_process(
    tmp_path: Path, number: int, code: int, starved: bool
) -> None:
    """starved: the head of Ray gets no time any more, as on a machine that is too busy, and cannot end the others."""
    mine = Identity.load_or_create(tmp_path / "enclave", ENCLAVE)
    command = [sys.executable, "-m", "darknight.worker", "--engine", "ray", "--listen", "127.0.0.1:0"]
    command += ["--memory-limit", "256MiB", "--state", str(tmp_path / "state"), "--operator", "acme"]
    command += ["--allow-enclave", str(tmp_path / "enclave" / "certificate.pem"), "--log-level", "warning"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "DARKNIGHT_"))}
    # A socket of Ray is in there, and a socket's path is short.
    with tempfile.TemporaryDirectory(prefix="dk-", dir="/tmp") as short:
        environment["TMPDIR"] = short
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert process.stdout is not None
            said = ""
            while "END CERTIFICATE" not in said:
                line = process.stdout.readline()
                assert line, f"the worker ended with {process.wait()}: {said}"
                said += line
            (address,) = [line.split()[1] for line in said.splitlines() if line.strip().startswith("listening")]
            processes = descendants(process.pid)
            assert len(processes) >= 4  # a Ray of its own: the head, the node, and actors
            certificate = (tmp_path / "state" / "certificate.pem").read_bytes()
            link = connect(address, certificate=certificate, identity=mine)
            try:
                one_step(link)
            finally:
                link.close()
            if starved:
                (head,) = [pid for pid in processes if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
                os.kill(head, signal.SIGSTOP)
            process.send_signal(number)
            assert process.wait(120) == code
            # After kill -9, agents of Ray look for their parent now and then.
            wait_until(lambda: not any(map(alive, processes)), "Ray's processes to end")
            if code == 0:
                assert not list(Path(short).glob("darknight-ray-*"))
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def one_step(link: Link) -> None:
    """A forward and a backward pass of a convolution, as an enclave asks for them."""
    op, feature, w_shape = LAYERS["conv"]
    x, w, delta = operands(op, (5, *feature), w_shape, torch.int32)
    weights, x_shape = weights_of(op, w, PRIME), tuple(x.shape)
    link.post(weights)
    task = ForwardTask(layer="net.0", call=1, version=1, tensor=x, compute=True, keep=True)
    expected = Expected({Pass.FORWARD: tuple(delta.shape)}, torch.int32, PRIME)
    found = link.ask(task, expected).result(180).tensors
    assert torch.equal(found[Pass.FORWARD], LOCAL.forward(weights, op, x))
    passes = (Pass.GRAD_INPUT, Pass.GRAD_WEIGHT)
    back = BackwardTask(layer="net.0", call=1, version=1, tensor=delta, passes=passes, x_shape=x_shape)
    expected = Expected({Pass.GRAD_INPUT: x_shape, Pass.GRAD_WEIGHT: w_shape}, torch.int32, PRIME)
    found = link.ask(back, expected).result(180).tensors
    assert torch.equal(found[Pass.GRAD_INPUT], LOCAL.grad_input(weights, op, delta, x_shape))
    assert torch.equal(found[Pass.GRAD_WEIGHT], LOCAL.grad_weight(weights, op, x, delta))


def test_a_ray_that_does_not_start_at_once_gets_another_chance(tmp_path):
    """As on a busy machine. What the first start left behind is ended; nothing else is."""
    folder, tried = str(tmp_path / "darknight-ray-test"), []
    leftover = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", folder])
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    class Slow:
        def init(self, **settings):
            tried.append(settings)
            if len(tried) == 1:
                raise RuntimeError("The current node timed out during startup.")

        def shutdown(self):
            pass

    try:
        engine = RayEngine.__new__(RayEngine)
        engine._ray = Slow()
        engine._begin({"address": "local"}, folder)
        assert len(tried) == 2
        assert leftover.wait(10) == -signal.SIGKILL
        assert bystander.poll() is None
        tried.clear()
        with pytest.raises(RuntimeError, match="timed out"):  # a cluster that is not ours is joined once
            engine._begin({"address": "10.0.0.1:6379"}, None)
        assert len(tried) == 1
    finally:
        for process in (leftover, bystander):
            process.kill()
            process.wait()
