"""What every test can use: the --full switch, the shared test material, and a summary that hides no skip."""

import os
import signal
import subprocess
from collections import defaultdict
from pathlib import Path

# Before torch and NumPy are loaded, which read them then: tests run side by side, and threads that spin take the cores
# from others. NumPy's wait for each other in every product of two short vectors, which statistics consist of.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import darknight.wire.tls  # noqa: F401 - before anything else imports gRPC, whose environment it sets
import warm

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run every test at its full count (make test-all)")


def pytest_configure(config):
    """A shell starts background jobs with Ctrl-C ignored, and children inherit that; tests of Ctrl-C need it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    warm.fresh = config.getoption("--full")
    warm.for_local_fleets()


# Files that take longest go first: side by side with the others, nobody waits for them at the end.
SLOWEST = (
    "runtime/test_attacks.py",
    "docs/test_howto.py",
    "coding/test_privacy_statistics.py",
    "cli/test_bench.py",
    "service/test_kill.py",
    "audit/test_shares_attacks.py",
    "worker/test_ray.py",
    "cli/test_train.py",
    "packaging/test_wheel.py",
    "train/test_accuracy.py",
    "runtime/test_faults.py",
    "integrity/test_real.py",
    "integrity/test_freivalds.py",
    "cli/test_submit.py",
    "fleet/test_soak.py",
    "docs/test_deploy_enclave.py",
    "fleet/test_local.py",
    "service/test_program.py",
    "service/test_no_plaintext.py",
    "audit/test_recorded_attacks.py",
    "docs/test_operate_workers.py",
    "cli/test_infer.py",
    "wire/test_grpc.py",
    "bench/test_ceiling.py",
    "fleet/test_local_training.py",
    "fleet/test_worker_memory.py",
    "bench/test_rival.py",
    "train/test_crashes.py",
)


def pytest_collection_modifyitems(config, items):
    if config.getoption("numprocesses", None) or os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=_turn)
    if config.getoption("--full"):
        return
    for item in items:
        if "full" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="runs only with --full (make test-all)"))


def _turn(item) -> int:
    return next((turn for turn, name in enumerate(SLOWEST) if item.path.as_posix().endswith(name)), len(SLOWEST))


@pytest.fixture(scope="session")
def full(request) -> bool:
    """True when full counts are asked for: ``count = 10_000 if full else 200``."""
    return request.config.getoption("--full")


@pytest.fixture(scope="module")
def one_thread():
    """For tests that multiply thousands of tiny tensors, where a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cold_fleets():
    """For tests of how dk.local_fleet starts its workers: as it does for a user, and not as in warm.py."""
    warm.cold = True
    yield
    warm.cold = False


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of optional shared test material; the test is skipped where it is absent."""
    folder = os.environ.get("DARKNIGHT_SHARED")
    if not folder:
        pytest.skip("DARKNIGHT_SHARED is not set")
    if not Path(folder).is_dir():
        pytest.skip("DARKNIGHT_SHARED does not name a folder")
    return Path(folder)


@pytest.fixture
def tally(request):
    """A line for the summary at the end: tally("field, noise", {"calls": 30, "wrong": 0})."""

    def count(title, counts):
        request.node.user_properties.append(("tally", (title, dict(counts))))

    return count


@pytest.fixture
def figure(request):
    """A measurement for the summary at the end, in words: figure("paper, smallest error", "0.3 of the result")."""

    def note(title, words):
        request.node.user_properties.append(("figure", (title, words)))

    return note


def pytest_terminal_summary(terminalreporter, config):
    _tallies(terminalreporter, each=config.getoption("--full"))
    _figures(terminalreporter)
    if config.getoption("--full"):
        _full_table(terminalreporter)
    _skips(terminalreporter)


def _tallies(reporter, *, each):
    """What tests counted: for each kind of them together, and before that test by test if `each` is to be shown."""
    lines = _noted(reporter, "tally")
    if not lines:
        return
    reporter.section("counts")
    totals = defaultdict(lambda: defaultdict(int))
    for title, counts in sorted(lines):
        if each:
            reporter.write_line(f"{title:<32} " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
        for what, count in counts.items():
            totals[title.split(",")[0]][what] += count
    for kind, counts in totals.items():
        reporter.write_line(f"{kind + ', all':<32} " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))


def _figures(reporter):
    lines = _noted(reporter, "figure")
    if lines:
        reporter.section("figures")
        for title, words in sorted(lines):
            reporter.write_line(f"{title:<32} {words}")


def _noted(reporter, kind):
    """What tests that passed left for the summary."""
    reports = reporter.stats.get("passed", [])
    return [value for report in reports for name, value in report.user_properties if name == kind]


def _skips(reporter):
    by_reason = defaultdict(list)
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        by_reason[reason.removeprefix("Skipped: ")].append(report.nodeid)
    if not by_reason:
        return
    reporter.section("skipped")
    for reason, tests in sorted(by_reason.items()):
        reporter.write_line(f"{len(tests)} because: {reason}")
        for test in sorted(tests):
            reporter.write_line(f"    {test}")


def _full_table(reporter):
    """Counts and seconds per folder of tests, with the commit they belong to."""
    outcomes = ("passed", "failed", "error", "skipped", "xfailed")
    rows = defaultdict(lambda: dict.fromkeys((*outcomes, "seconds"), 0))
    for outcome, reports in reporter.stats.items():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            row = rows[str(Path(report.location[0]).parent)]
            row["seconds"] += report.duration
            if outcome in outcomes:
                row[outcome] += 1
    reporter.section(f"full run, {_commit()}")
    reporter.write_line(f"{'folder':<36}" + "".join(f"{name:>9}" for name in (*outcomes, "seconds")))
    for folder, row in sorted(rows.items()):
        counts = "".join(f"{row[name]:>9}" for name in outcomes)
        reporter.write_line(f"{folder:<36}{counts}{row['seconds']:>9.1f}")


def _commit() -> str:
    def git(*command):
        return subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return f"commit {git('rev-parse', '--short=12', 'HEAD')}{' with local changes' if git('status', '-s') else ''}"
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
