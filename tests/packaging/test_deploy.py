"""deploy/: every file passes its own linter, uses flags that the worker has, and agrees with itself about paths."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from darknight.types import Expected, ForwardTask, Pass, Weights
from darknight.wire.grpc_link import connect
from darknight.wire.identity import ENCLAVE, Identity
from darknight.worker.budget import size_from
from darknight.worker.machine import _ASIDE
from darknight.worker.options import Options, read_options
from worker.stations import OP, PRIME, residues

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE, MANIFEST = DEPLOY / "Dockerfile", DEPLOY / "kubernetes.yaml"
UNIT, SANDBOX = DEPLOY / "darknight-worker.service", DEPLOY / "bubblewrap.sh"

# What a worker takes beside its limit: the program with torch in it, and what darknight.worker.machine puts aside.
BESIDE = _ASIDE + (512 << 20)


def tool(name: str) -> str:
    """A linter: beside this Python, or of the system."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return found or pytest.skip(f"{name} is not installed")


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """The flags of `python -m darknight.worker --help`."""
    done = run(sys.executable, "-m", "darknight.worker", "--help")
    assert done.returncode == 0
    return set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", done.stdout, flags=re.MULTILINE))


def parsed(argv: list[str], environment: dict[str, str] | None = None) -> Options:
    """As the worker reads them; a flag or a value that it does not know ends the test."""
    try:
        return read_options(argv, environment or {})
    except SystemExit as end:
        pytest.fail(f"the worker refuses {argv}: exit code {end.code}")


# --- Docker ----------------------------------------------------------------------------------------------------------
def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) in order; comments dropped, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def values(name: str) -> list[str]:
    return [rest for instruction, rest in instructions(DOCKERFILE.read_text()) if instruction == name]


def test_the_dockerfile_has_no_findings(tmp_path):
    hadolint = tool("hadolint")
    done = run(hadolint, "--no-color", DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")
    broken = tmp_path / "Dockerfile"
    broken.write_text(DOCKERFILE.read_text().replace("USER 10001", "USER root").replace("3.11-slim-bookworm", "latest"))
    found = run(hadolint, "--no-color", broken)
    assert found.returncode == 1
    assert {"DL3002", "DL3007"} <= set(re.findall(r"DL\d+", found.stdout))


def test_the_image_holds_the_worker_alone_and_is_not_root():
    copied = [part for rest in values("COPY") if not rest.startswith("--from") for part in rest.split()[:-1]]
    assert copied
    assert all((ROOT / part).exists() for part in copied)
    assert [rest for rest in values("RUN") if "pip wheel" in rest and rest.endswith("./worker-package")]
    second = DOCKERFILE.read_text().split("FROM ")[2]
    assert [line for line in second.splitlines() if line.startswith("COPY")] == [
        "COPY --from=build /source/constraints.txt /tmp/constraints.txt",
        "COPY --from=build /wheels /tmp/wheels",
    ]
    assert re.fullmatch(r"[1-9]\d*", values("USER")[-1])
    assert values("ENTRYPOINT") == ['["python", "-m", "darknight.worker"]']


def test_the_image_starts_with_settings_that_the_worker_knows(flags):
    settings = dict(part.split("=", 1) for rest in values("ENV") for part in rest.split())
    ours = {name: value for name, value in settings.items() if name.startswith("DARKNIGHT_")}
    assert ours.keys() <= {f"DARKNIGHT_WORKER_{flag[2:].replace('-', '_').upper()}" for flag in flags}
    example = re.search(r"darknight-worker (--operator .*)", DOCKERFILE.read_text())
    options = parsed(shlex.split(example[1]), ours)
    metrics = options.metrics[1]
    link = options.listen.rpartition(":")[2]
    assert values("EXPOSE") == [f"{link} {options.pipe_port} {metrics}"]
    assert f"--publish {link}-{options.pipe_port}:{link}-{options.pipe_port}" in DOCKERFILE.read_text()
    assert f"http://127.0.0.1:{metrics}/healthz" in values("HEALTHCHECK")[0]
    assert options.state.is_relative_to(values("VOLUME")[0])
    assert f"--home-dir {values('VOLUME')[0]}" in values("RUN")[-1]  # so that it is the worker's to write
    assert f"enclave.pem:{options.allow_enclave[0]}:ro" in DOCKERFILE.read_text()


# --- Kubernetes ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def manifest() -> dict[str, dict]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    documents = [document for document in yaml.safe_load_all(MANIFEST.read_text()) if document]
    assert [document["kind"] for document in documents] == ["Deployment", "Service", "NetworkPolicy"]
    return {document["kind"]: document for document in documents}


def test_the_manifest_fits_the_schemas_of_kubernetes(manifest):
    judge = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in manifest.values():
        judge.validate(document, judge.latest_version(), strict=True)
    pod = manifest["Deployment"]["spec"]["template"]["spec"]
    broken = {**manifest["Deployment"], "spec": {**manifest["Deployment"]["spec"], "replica": 1}}
    with pytest.raises(judge.ValidationError):
        judge.validate(broken, judge.latest_version(), strict=True)
    assert pod["automountServiceAccountToken"] is False


def test_the_pod_runs_the_worker_closed_in(manifest, flags):
    pod = manifest["Deployment"]["spec"]["template"]["spec"]
    (worker,), (first,) = pod["containers"], pod["initContainers"]
    assert {argument.partition("=")[0] for argument in worker["args"]} <= flags
    options = parsed(worker["args"])
    for container in (worker, first):
        closed = container["securityContext"]
        assert closed["readOnlyRootFilesystem"] is True
        assert closed["allowPrivilegeEscalation"] is False
        assert closed["capabilities"] == {"drop": ["ALL"]}
        assert container["image"] == worker["image"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert str(pod["securityContext"]["runAsUser"]) == values("USER")[-1]
    # Room for the program itself, and time for the tasks under way.
    assert _kubernetes_size(worker["resources"]["limits"]["memory"]) >= options.memory_limit + BESIDE
    assert pod["terminationGracePeriodSeconds"] > options.grace
    # One key is one worker, and it is there before the worker starts, under the mode that the worker insists on.
    assert manifest["Deployment"]["spec"]["replicas"] == 1
    assert manifest["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    mounts = {mount["name"]: mount for mount in worker["volumeMounts"]}
    assert options.state == Path(mounts["state"]["mountPath"])
    assert options.allow_enclave[0].parent == Path(mounts["enclaves"]["mountPath"])
    assert f"--target-directory={options.state}" in first["command"]
    assert "--mode=0600" in first["command"]
    sources = {mount["mountPath"] for mount in first["volumeMounts"]}
    assert {str(Path(path).parent) for path in first["args"]} <= sources
    assert {mount["name"] for mount in worker["volumeMounts"] + first["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def test_probes_service_and_policy_lead_to_the_workers_ports(manifest):
    (worker,) = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    options = parsed(worker["args"])
    ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
    assert ports == {
        "link": int(options.listen.rpartition(":")[2]),
        "pipe": options.pipe_port,
        "metrics": options.metrics[1],
    }
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert worker[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    labels = manifest["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifest["Service"]["spec"]["selector"] == labels
    assert [port["targetPort"] for port in manifest["Service"]["spec"]["ports"]] == ["link", "pipe"]
    policy = manifest["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []  # calls nobody
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == ["link", "pipe", "metrics"]
    assert all(rule["from"] for rule in policy["ingress"])  # an empty list would be everybody


def _kubernetes_size(text: str) -> int:
    return size_from(f"{text}B")


# --- systemd ---------------------------------------------------------------------------------------------------------
def directives() -> dict[str, str]:
    lines = UNIT.read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if line and line[0] not in "#[")
    return found


def test_the_unit_is_one_that_systemd_understands(tmp_path):
    analyze = tool("systemd-analyze")
    # The interpreter is not installed where the tests run; everything else is as it is.
    text = UNIT.read_text().replace("/opt/darknight/bin/python", sys.executable)
    assert text != UNIT.read_text()
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    done = run(analyze, "verify", "--man=no", unit)
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(text.replace("ProtectHome=", "ProtectHouse="))
    assert "Unknown key" in run(analyze, "verify", "--man=no", unit).stderr


def test_the_unit_exposes_little(tmp_path):
    analyze = tool("systemd-analyze")
    if "--offline" not in run(analyze, "--help").stdout:
        pytest.skip("this systemd-analyze cannot judge a file (needs version 250)")
    assert run(analyze, "security", "--offline=true", "--threshold=20", UNIT).returncode == 0
    open_ = tmp_path / UNIT.name
    open_.write_text(re.sub(r"^(Protect|Private|Restrict|System|Capab).*\n", "", UNIT.read_text(), flags=re.MULTILINE))
    assert run(analyze, "security", "--offline=true", "--threshold=20", open_).returncode != 0


def test_the_unit_starts_the_worker_with_flags_that_it_has(flags):
    found = directives()
    python, *argv = shlex.split(found["ExecStart"].replace("%S", "/var/lib").replace("%E", "/etc"))
    assert (Path(python).name, argv[:2]) == ("python", ["-m", "darknight.worker"])
    options = parsed(argv[2:])
    assert {part for part in argv if part.startswith("--")} <= flags
    assert options.state == Path("/var/lib") / found["StateDirectory"]
    assert str(options.allow_enclave[0]) in UNIT.read_text()  # the comment says where to put it
    assert size_from(f"{found['MemoryMax']}iB") >= options.memory_limit + BESIDE
    assert float(found["TimeoutStopSec"]) > options.grace
    assert found["RestartPreventExitStatus"] == "2"
    (variable,) = re.findall(r"DARKNIGHT_WORKER_(\w+)=acme", UNIT.read_text())
    assert f"--{variable.lower()}" in flags


# --- bubblewrap ------------------------------------------------------------------------------------------------------
def test_the_sandbox_script_has_no_findings(tmp_path, flags):
    assert os.access(SANDBOX, os.X_OK)
    assert run("sh", "-n", SANDBOX).returncode == 0
    text = SANDBOX.read_text()
    worker_flags = re.findall(r"--[a-z-]+", re.search(r"-m darknight\.worker (.*)", text)[1])
    worker_flags += re.findall(r"--[a-z-]+", re.search(r"~/worker enclave.pem (.*)", text)[1])
    assert len(worker_flags) == 4
    assert set(worker_flags) <= flags
    shellcheck = tool("shellcheck")
    assert run(shellcheck, SANDBOX).stdout == ""
    broken = tmp_path / "broken.sh"
    broken.write_text(text.replace('"$state" /state', "$state /state"))
    assert "SC2086" in run(shellcheck, broken).stdout


def test_the_sandbox_script_says_how_it_is_used():
    done = run("sh", SANDBOX)
    assert done.returncode == 2
    assert "usage: bubblewrap.sh STATE ENCLAVE_CERTIFICATE" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)]
)
def test_a_worker_in_the_sandbox_serves_sees_little_and_stops_gently(tmp_path, number, code):
    bwrap = tool("bwrap")
    if run(bwrap, "--unshare-all", "--ro-bind", "/", "/", "true").returncode:
        pytest.skip("bubblewrap may not make namespaces here")
    mine = Identity.load_or_create(tmp_path / "enclave", ENCLAVE)
    (tmp_path / "private.txt").touch()
    command = ["sh", SANDBOX, tmp_path / "state", tmp_path / "enclave" / "certificate.pem"]
    command += ["--listen", "127.0.0.1:0", "--operator", "acme", "--memory-limit", "256MiB"]
    environment = {**os.environ, "PYTHON": sys.executable, "SECRET_OF_THE_SHELL": "x"}
    script = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        said = ""
        while "END CERTIFICATE" not in said:
            line = script.stdout.readline()
            assert line, f"the sandbox ended with {script.wait()}: {script.stderr.read()}"
            said += line
        (address,) = [line.split()[1] for line in said.splitlines() if line.strip().startswith("listening")]
        _looks_around(only_child(only_child(script.pid)), tmp_path)
        link = connect(address, certificate=(tmp_path / "state" / "certificate.pem").read_bytes(), identity=mine)
        w, x = residues(3, 5), residues(2, 5)
        link.post(Weights(layer="a", version=1, op=OP.spec(), prime=PRIME, tensor=w))
        task = ForwardTask(layer="a", call=1, version=1, tensor=x, compute=True, keep=False)
        answer = link.ask(task, Expected({Pass.FORWARD: (2, 3)}, x.dtype, PRIME)).result(30)
        assert answer.tensors[Pass.FORWARD].tolist() == ((x.long()[:, None] * w.long() % PRIME).sum(2) % PRIME).tolist()
        link.close()
        script.send_signal(number)
        _, log = script.communicate(timeout=30)
        assert script.returncode == code
        assert "stopped" in log
    finally:
        script.kill()  # and the worker dies with it
        script.communicate()


def _looks_around(worker: int, outside: Path) -> None:
    """What the worker sees, through its own eyes."""
    root = Path(f"/proc/{worker}/root")
    # As a path from outside: an absolute one would be looked up here, not there.
    assert not (root / str(outside / "private.txt").lstrip("/")).exists()
    assert not (root / "home").exists()
    home = root / str(Path.home()).lstrip("/")
    allowed = {Path(sys.prefix), Path(sys.base_prefix), ROOT / "src"}
    if not any(path.is_relative_to(Path.home()) for path in allowed):
        assert not home.exists()
    assert b"SECRET_OF_THE_SHELL" not in Path(f"/proc/{worker}/environ").read_bytes()
    writable = set()
    for line in Path(f"/proc/{worker}/mountinfo").read_text().splitlines():
        fields = line.split()
        if "rw" in fields[5].split(","):
            writable.add(fields[4])
    assert {point for point in writable if not point.startswith(("/dev/", "/proc/"))} <= {
        "/", "/state", "/tmp", "/dev", "/proc",
    }  # fmt: skip
    capabilities = re.search(r"CapEff:\s*(\w+)", Path(f"/proc/{worker}/status").read_text())
    assert int(capabilities[1], 16) == 0


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
