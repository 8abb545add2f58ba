"""deploy/enclave: the manifest for Gramine keeps every rule, and each rule can be broken; image and unit agree with it.

Gramine itself is not needed: the template is rendered as gramine-manifest does, and read as TOML.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import jinja2
import jinja2.meta
import pytest

from darknight.wire.job_channel import _CONVERSATIONS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "enclave"
TEMPLATE, DOCKERFILE = FOLDER / "darknight.manifest.template", FOLDER / "Dockerfile"
UNIT = FOLDER / "darknight-enclave.service"
ARCH = "/lib/x86_64-linux-gnu"
RUNTIME = f"{ARCH}/gramine/runtime/glibc"
IDENTITY = PurePosixPath("/var/lib/darknight/identity")
_GRAMINES_OWN, _SIZES = 4, {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10}
# What the host may see and change. Anything else in allowed_files is a mistake, however harmless it looks.
_CIPHERTEXT, _SIGNED_BY_INTEL = (
    PurePosixPath("/var/lib/darknight/state"),
    PurePosixPath("/var/lib/darknight/collateral"),
)


def tool(name: str) -> str:
    """A linter: beside this Python, or of the system."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return found or pytest.skip(f"{name} is not installed")


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)


def rendered(text: str, **variables: object) -> dict[str, Any]:
    gramine = SimpleNamespace(libos=f"{ARCH}/gramine/libsysdb.so", runtimedir=lambda: RUNTIME)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    return tomllib.loads(environment.from_string(text).render(gramine=gramine, arch_libdir=ARCH, **variables))


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """The flags of `darknight enclave --help`."""
    done = subprocess.run(
        [sys.executable, "-m", "darknight.cli", "enclave", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0
    return set(re.findall(r"^[│ ]*(--[a-z-]+)", done.stdout, flags=re.MULTILINE))


# --- the rules -------------------------------------------------------------------------------------------------------
class Mounts:
    """Where a path of the enclave lies on the host, and as what."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.all = manifest["fs"]["mounts"]
        self.root = manifest["fs"].get("root", {})

    def of(self, path: str) -> dict[str, str] | None:
        """The innermost mount that has it."""
        found = [mount for mount in self.all if PurePosixPath(path).is_relative_to(mount["path"])]
        return max(found, key=lambda mount: len(PurePosixPath(mount["path"]).parts), default=None)

    def kind(self, path: str) -> str | None:
        mount = self.of(path)
        return None if mount is None else mount.get("type", "chroot")

    def on_host(self, path: str) -> PurePosixPath | None:
        mount = self.of(path)
        if mount is None or mount.get("type", "chroot") != "chroot":
            return None
        return _place(mount["uri"]) / PurePosixPath(path).relative_to(mount["path"])


def _place(uri: str) -> PurePosixPath:
    return PurePosixPath(uri.removeprefix("file:"))


def _places(entries: list[Any]) -> list[PurePosixPath]:
    return [_place(entry if isinstance(entry, str) else entry["uri"]) for entry in entries]


def _under(place: PurePosixPath | None, folders: list[PurePosixPath]) -> bool:
    return place is not None and any(place.is_relative_to(folder) for folder in folders)


def _keys(table: object) -> Iterator[str]:
    if isinstance(table, dict):
        for key, value in table.items():
            yield key
            yield from _keys(value)
    elif isinstance(table, list):
        for value in table:
            yield from _keys(value)


def _value_of(flag: str, argv: list[str]) -> str:
    return argv[argv.index(flag) + 1] if flag in argv[:-1] else "/nowhere"


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+)([GMK])", size)
    return int(match[1]) * _SIZES[match[2]] if match else 0


def arguments(manifest: dict[str, Any], known: set[str]) -> bool:
    """They are in the manifest, of our program, and every flag is one that it has."""
    loader, entrypoint = manifest["loader"], manifest["libos"]["entrypoint"]
    argv = loader.get("argv")
    if not isinstance(argv, list) or "argv_src_file" in loader:
        return False
    given = {part for part in argv if part.startswith("--")}
    return argv[:6] == [entrypoint, "-I", "-B", "-m", "darknight.cli", "enclave"] and given <= known


def no_insecure_option(manifest: dict[str, Any], known: set[str]) -> bool:
    flagged = [part for part in manifest["loader"].get("argv", []) if part.startswith("--insecure")]
    return not flagged and not [key for key in _keys(manifest) if key.startswith(("insecure__", "debug__"))]


def no_host_environment(manifest: dict[str, Any], known: set[str]) -> bool:
    variables = manifest["loader"].get("env", {})
    fixed = all(isinstance(value, str) or value.keys() == {"value"} for value in variables.values())
    ruling = [name for name in variables if name.startswith(("DARKNIGHT", "PYTHON", "LD_PRELOAD", "GRPC"))]
    return fixed and not ruling and "env_src_file" not in manifest["loader"]


def no_host_settings(manifest: dict[str, Any], known: set[str]) -> bool:
    """Nothing else that comes from the host when the enclave starts: its names, its current folder, its devices."""
    root, system = manifest["fs"].get("root", {}), manifest.get("sys", {})
    place = _place(root.get("uri", "file:."))
    odd = {"enable_extra_runtime_domain_names_conf", "allowed_ioctls"} & system.keys()
    return place.is_absolute() and len(place.parts) > 2 and "start_dir" not in manifest["fs"] and not odd


def threads_and_arenas(manifest: dict[str, Any], known: set[str]) -> bool:
    variables = manifest["loader"].get("env", {})
    values = [variables.get(name) for name in ("OMP_NUM_THREADS", "MALLOC_ARENA_MAX")]
    return all(isinstance(value, str) and re.fullmatch(r"[1-9]\d*", value) for value in values)


def production(manifest: dict[str, Any], known: set[str]) -> bool:
    sgx = manifest["sgx"]
    watched = [sgx.get("enable_stats", False), sgx.get("vtune_profile", False), sgx.get("profile", {})]
    quiet = manifest["loader"].get("log_level") == "error" and "log_file" not in manifest["loader"]
    return sgx.get("debug") is False and not any(watched) and quiet


def attested(manifest: dict[str, Any], known: set[str]) -> bool:
    return manifest["sgx"].get("remote_attestation") == "dcap"


def no_subprocesses(manifest: dict[str, Any], known: set[str]) -> bool:
    return manifest.get("sys", {}).get("disallow_subprocesses") is True


def strict_files(manifest: dict[str, Any], known: set[str]) -> bool:
    return manifest["sgx"].get("file_check_policy", "strict") == "strict"


def trusted(manifest: dict[str, Any], known: set[str]) -> bool:
    """Gramine, its C library, the interpreter, the libraries, DarKnight and the fleet file are measured."""
    mounts, measured = Mounts(manifest), _places(manifest["sgx"].get("trusted_files", []))
    argv = manifest["loader"].get("argv", [])
    inside = [
        manifest["libos"]["entrypoint"],
        "/lib/libc.so.6",
        f"{ARCH}/libstdc++.so.6",
        "/usr/local/lib/libpython3.11.so.1.0",
        "/usr/local/lib/python3.11/ssl.py",
        "/opt/darknight/lib/python3.11/site-packages/darknight/service/program.py",
        _value_of("--fleet", argv),
    ]
    return _under(_place(manifest["loader"]["entrypoint"]["uri"]), measured) and all(
        _under(mounts.on_host(path), measured) for path in inside
    )


def allowed(manifest: dict[str, Any], known: set[str]) -> bool:
    """Ciphertext and what Intel signed, and the flags point there; nothing that is trusted or encrypted."""
    mounts, argv = Mounts(manifest), manifest["loader"].get("argv", [])
    open_places, measured = _places(manifest["sgx"].get("allowed_files", [])), _places(manifest["sgx"]["trusted_files"])
    if not all(_under(place, [_CIPHERTEXT, _SIGNED_BY_INTEL]) for place in open_places):
        return False
    if any(_under(place, measured) or _under(other, open_places) for place in open_places for other in measured):
        return False
    return all(_under(mounts.on_host(_value_of(flag, argv)), open_places) for flag in ("--state", "--collateral"))


def mounts(manifest: dict[str, Any], known: set[str]) -> bool:
    """Every folder of the host is wholly trusted or wholly allowed; /tmp is in memory; no device, no shared memory."""
    classes = _places(manifest["sgx"]["trusted_files"]) + _places(manifest["sgx"].get("allowed_files", []))
    all_of_them = Mounts(manifest)
    for mount in all_of_them.all:
        kind = mount.get("type", "chroot")
        if kind not in ("chroot", "encrypted", "tmpfs"):
            return False
        if kind == "chroot" and not (mount["uri"].startswith("file:/") and _under(_place(mount["uri"]), classes)):
            return False
    return all_of_them.kind("/tmp/x") == "tmpfs"


def identity(manifest: dict[str, Any], known: set[str]) -> bool:
    """The key for workers is encrypted under this measurement, and reachable in no other way."""
    sealed = [mount for mount in manifest["fs"]["mounts"] if mount.get("type") == "encrypted"]
    if len(sealed) != 1 or Mounts(manifest).of(str(IDENTITY / "key.pem")) != sealed[0]:
        return False
    place, others = _place(sealed[0]["uri"]), [mount for mount in manifest["fs"]["mounts"] if mount != sealed[0]]
    reached = [_place(mount["uri"]) for mount in others if "uri" in mount]
    return sealed[0].get("key_name") == "_sgx_mrenclave" and not any(
        place.is_relative_to(other) or other.is_relative_to(place) for other in reached
    )


def sizes(manifest: dict[str, Any], known: set[str]) -> bool:
    size = _bytes(manifest["sgx"].get("enclave_size", ""))
    enough = size >= 4 << 30 and size & (size - 1) == 0 and _bytes(manifest["sys"]["stack"]["size"]) >= 2 << 20
    threads = int(manifest["loader"].get("env", {}).get("OMP_NUM_THREADS", 1))
    return enough and manifest["sgx"].get("max_threads", 4) >= _CONVERSATIONS + 20 + threads + _GRAMINES_OWN


RULES: tuple[Callable[[dict[str, Any], set[str]], bool], ...] = (
    arguments, no_insecure_option, no_host_environment, no_host_settings, threads_and_arenas, production, attested,
    no_subprocesses, strict_files, trusted, allowed, mounts, identity, sizes,
)  # fmt: skip


def broken_rules(manifest: dict[str, Any], known: set[str]) -> set[str]:
    return {rule.__name__ for rule in RULES if not rule(manifest, known)}


# --- the manifest ----------------------------------------------------------------------------------------------------
def test_the_manifest_keeps_every_rule(flags):
    assert broken_rules(rendered(TEMPLATE.read_text()), flags) == set()


def test_it_does_so_with_every_variable_set(flags):
    manifest = rendered(TEMPLATE.read_text(), listen="10.0.0.7:443", threads="16", size="64G")
    assert broken_rules(manifest, flags) == set()
    assert "10.0.0.7:443" in manifest["loader"]["argv"]
    assert manifest["loader"]["env"]["OMP_NUM_THREADS"] == "16"
    assert manifest["sgx"]["enclave_size"] == "64G"


def test_nothing_else_decides_what_is_rendered():
    named = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(TEMPLATE.read_text()))
    assert named == {"gramine", "arch_libdir", "listen", "threads", "size"}  # no environment of whoever renders it


STATE, COLLATERAL = '"file:/var/lib/darknight/state/",', '"file:/var/lib/darknight/collateral/",'
ENCRYPTED = 'key_name = "_sgx_mrenclave"'
BROKEN = {
    "arguments of the host": ("arguments", "loader.argv = [", "loader.insecure__use_cmdline_argv = true\nunused = ["),
    "arguments in a file": ("arguments", "loader.argv = [", 'loader.argv_src_file = "file:/argv"\nloader.argv = ['),
    "another program": ("arguments", '"darknight.cli",\n', '"http.server",\n'),
    "Python's own variables": ("arguments", '"-I", ', ""),
    "a flag that there is not": ("arguments", '"--log-level", "info"', '"--verbose", "info"'),
    "simulated evidence": (
        "no_insecure_option",
        '"--log-level", "info"',
        '"--insecure-simulated-platform", "/tmp/platform"',
    ),
    "one operator for all": ("no_insecure_option", '"--log-level",', '"--insecure-one-operator", "--log-level",'),
    "eventfd by the host": ("no_insecure_option", "sys.disallow", "sys.insecure__allow_eventfd = true\nsys.disallow"),
    "no randomised addresses": ("no_insecure_option", "sgx.debug", "loader.insecure__disable_aslr = true\nsgx.debug"),
    "a key in the manifest": ("no_insecure_option", "sgx.debug", f'fs.insecure__keys.k = "{"00" * 16}"\nsgx.debug'),
    "system calls outside": ("no_insecure_option", "sgx.debug", "sgx.insecure__rpc_thread_num = 4\nsgx.debug"),
    "the host's environment": (
        "no_insecure_option",
        "loader.env.LANG",
        "loader.insecure__use_host_env = true\nloader.env.LANG",
    ),
    "a variable of the host": (
        "no_host_environment",
        'loader.env.HOME = "/tmp"',
        "loader.env.HOME = { passthrough = true }",
    ),
    "variables in a file": (
        "no_host_environment",
        "loader.env.LANG",
        'loader.env_src_file = "file:/env"\nloader.env.LANG',
    ),
    "a library in front": (
        "no_host_environment",
        "loader.env.LANG",
        'loader.env.LD_PRELOAD = "/tmp/x.so"\nloader.env.LANG',
    ),
    "a flag by a variable": (
        "no_host_environment",
        "loader.env.LANG",
        'loader.env.DARKNIGHT_ENCLAVE_FLEET = "/tmp/f"\nloader.env.LANG',
    ),
    "the host's current folder": ("no_host_settings", 'fs.root.uri = "file:/opt/darknight/root"\n', ""),
    "the host's whole disk": ("no_host_settings", "file:/opt/darknight/root", "file:/"),
    "the host's names": (
        "no_host_settings",
        "sys.stack",
        "sys.enable_extra_runtime_domain_names_conf = true\nsys.stack",
    ),
    "threads as they come": ("threads_and_arenas", "loader.env.OMP_NUM_THREADS", "loader.env.UNUSED"),
    "arenas as they come": ("threads_and_arenas", "loader.env.MALLOC_ARENA_MAX", "loader.env.UNUSED"),
    "a debug enclave": ("production", "sgx.debug = false", "sgx.debug = true"),
    "debug by default": ("production", "sgx.debug = false", ""),
    "a talkative log": ("production", 'loader.log_level = "error"', 'loader.log_level = "trace"'),
    "statistics": ("production", "sgx.debug", "sgx.enable_stats = true\nsgx.debug"),
    "no evidence": ("attested", 'sgx.remote_attestation = "dcap"', 'sgx.remote_attestation = "none"'),
    "evidence of the old kind": ("attested", '"dcap"', '"epid"'),
    "other programs": ("no_subprocesses", "sys.disallow_subprocesses = true", "sys.disallow_subprocesses = false"),
    "other programs by default": ("no_subprocesses", "sys.disallow_subprocesses = true", ""),
    "all files, and a log": ("strict_files", "sgx.debug", 'sgx.file_check_policy = "allow_all_but_log"\nsgx.debug'),
    "code that is not measured": ("trusted", '  "file:/opt/darknight/",\n', ""),
    "Python that is not measured": ("trusted", '  "file:/usr/local/lib/",\n', ""),
    "libraries that are not measured": ("trusted", '  "file:{{ arch_libdir }}/",\n', ""),
    "a fleet that is not measured": ("trusted", '  "file:/etc/darknight/",\n', ""),
    "a fleet from the host": ("trusted", '"/etc/darknight/fleet.toml"', '"/var/lib/darknight/state/fleet.toml"'),
    "code that may be changed": ("allowed", STATE, f'{STATE} "file:/opt/darknight/",'),
    "a fleet that may be changed": ("allowed", STATE, f'{STATE} "file:/etc/darknight/fleet.toml",'),
    "names of the host's users": ("allowed", STATE, f'{STATE} "file:/etc/passwd",'),
    "everything beside the queue": ("allowed", STATE, '"file:/var/lib/darknight/",'),
    "the key beside the queue": ("allowed", COLLATERAL, f'{COLLATERAL} "file:/var/lib/darknight/identity/",'),
    "a queue that is trusted": ("allowed", '"file:/etc/darknight/",', '"file:/etc/darknight/", "file:/var/lib/",'),
    "a queue that is nowhere": ("allowed", '"--state", "/var/lib/darknight/state"', '"--state", "/tmp/state"'),
    "/tmp on the host": ("mounts", '{ type = "tmpfs", path = "/tmp" }', '{ path = "/tmp", uri = "file:/tmp" }'),
    "memory shared with the host": (
        "mounts",
        '{ type = "tmpfs", path = "/tmp" },',
        '{ type = "tmpfs", path = "/tmp" }, { type = "untrusted_shm", path = "/dev/shm", uri = "dev:/dev/shm" },',
    ),
    "a folder of neither kind": (
        "mounts",
        '{ type = "tmpfs", path = "/tmp" },',
        '{ type = "tmpfs", path = "/tmp" }, { path = "/root", uri = "file:/root" },',
    ),
    "a key that the signer can read": ("identity", ENCRYPTED, 'key_name = "_sgx_mrsigner"'),
    "a key under a default key": ("identity", f", {ENCRYPTED}", ""),
    "a key in the clear": ("identity", 'type = "encrypted", path', "path"),
    "a key in another place": ("identity", 'path = "/var/lib/darknight/identity"', 'path = "/var/lib/other"'),
    "a key with a second door": (
        "identity",
        '{ type = "tmpfs", path = "/tmp" },',
        '{ type = "tmpfs", path = "/tmp" }, { path = "/lib2", uri = "file:/var/lib" },',
    ),
    "too small": ("sizes", "default('16G')", "default('1G')"),
    "no power of two": ("sizes", "default('16G')", "default('12G')"),
    "threads that do not suffice": ("sizes", "sgx.max_threads = 128", "sgx.max_threads = 16"),
    "stacks that do not suffice": ("sizes", 'sys.stack.size = "8M"', 'sys.stack.size = "256K"'),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_manifest_is_refused(name, flags):
    rule, old, new = BROKEN[name]
    text = TEMPLATE.read_text()
    assert text.count(old) >= 1
    assert rule in broken_rules(rendered(text.replace(old, new)), flags)


def test_every_rule_can_fail():
    assert {rule for rule, _, _ in BROKEN.values()} == {rule.__name__ for rule in RULES}


# --- the image -------------------------------------------------------------------------------------------------------
def stages() -> dict[str, str]:
    """Each stage of the Dockerfile by its name, comments dropped, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    found = "\n".join(lines).replace("\\\n", " ").split("FROM ")[1:]
    return {stage.splitlines()[0].split(" AS ")[1]: stage for stage in found}


def test_the_dockerfile_has_no_findings(tmp_path):
    hadolint = tool("hadolint")
    done = run(hadolint, "--no-color", DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")
    broken = tmp_path / "Dockerfile"
    text = DOCKERFILE.read_text()
    broken.write_text(text.replace("USER 10001", "USER root").replace('"gramine=$GRAMINE_VERSION"', "gramine"))
    found = run(hadolint, "--no-color", broken)
    assert found.returncode == 1
    assert {"DL3002", "DL3008"} <= set(re.findall(r"DL\d+", found.stdout))


def test_the_image_has_what_the_manifest_names():
    found, manifest = stages(), rendered(TEMPLATE.read_text())
    assert list(found) == ["build", "enclave", "guest", "gramine"]
    for stage in found.values():
        copied = [line.split()[1:-1] for line in stage.splitlines() if re.match(r"COPY (?!--from)", line)]
        assert all((ROOT / part).exists() for parts in copied for part in parts)
    assert [part for part in found["build"].split() if part == "constraints.txt"]
    entrypoint, root = PurePosixPath(manifest["libos"]["entrypoint"]), manifest["fs"]["root"]["uri"]
    assert f"-m venv --copies --without-pip {entrypoint.parent.parent} " in found["enclave"]
    assert f"--python {entrypoint} install" in found["enclave"]
    assert f" {root.removeprefix('file:')} " in found["enclave"]
    assert found["enclave"].count("--no-compile") == found["enclave"].count(" install --no-cache-dir") == 2
    for folder in (_CIPHERTEXT, _SIGNED_BY_INTEL, IDENTITY):
        assert re.search(rf"install --directory --owner darknight .*{folder}\b", found["enclave"])
    assert found["gramine"].rstrip().endswith('CMD ["gramine-sgx", "darknight"]')
    assert "COPY deploy/enclave/darknight.manifest.template ./" in found["gramine"]
    assert {match for stage in ("guest", "gramine") for match in re.findall(r"^USER (\S+)", found[stage], re.M)} == {
        "10001"
    }


# --- the unit of a guest ---------------------------------------------------------------------------------------------
def directives(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if line and line[0] not in "#[")


def test_the_unit_is_one_that_systemd_understands_and_exposes_little(tmp_path):
    analyze = tool("systemd-analyze")
    unit = tmp_path / UNIT.name
    text = UNIT.read_text().replace("/opt/darknight/bin/python3.11", sys.executable)
    assert text != UNIT.read_text()
    unit.write_text(text)
    done = run(analyze, "verify", "--man=no", unit)
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(text.replace("ReadWritePaths=", "ReadWritePlaces="))
    assert "Unknown key" in run(analyze, "verify", "--man=no", unit).stderr
    if "--offline" not in run(analyze, "--help").stdout:
        pytest.skip("this systemd-analyze cannot judge a file (needs version 250)")
    assert run(analyze, "security", "--offline=true", "--threshold=25", UNIT).returncode == 0
    unit.write_text(re.sub(r"^(Protect|Private|Restrict|System|Capab).*\n", "", UNIT.read_text(), flags=re.MULTILINE))
    assert run(analyze, "security", "--offline=true", "--threshold=25", unit).returncode != 0


def test_the_unit_starts_what_the_manifest_starts(flags):
    found, manifest = directives(UNIT.read_text()), rendered(TEMPLATE.read_text())
    argv = shlex.split(found["ExecStart"].replace("%S", "/var/lib"))
    assert argv == manifest["loader"]["argv"]
    assert {part for part in argv if part.startswith("--")} <= flags
    settings = dict(part.split("=") for part in found["Environment"].split())
    for name in ("OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "HOME"):
        assert settings[name] == manifest["loader"]["env"][name]
    assert not {"EnvironmentFile", "PassEnvironment"} & found.keys()
    assert (found["LimitCORE"], found["MemorySwapMax"], found["Conflicts"]) == ("0", "0", "swap.target")
    assert int(found["TasksMax"]) == manifest["sgx"]["max_threads"]
    assert [f"/var/lib/{name}" for name in found["StateDirectory"].split()] == [str(_CIPHERTEXT), str(_SIGNED_BY_INTEL)]
