"""Help, and everything that the command refuses: one clear line, the right exit code, no traceback, no files."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cli.command import clean_environment, darknight, refused, warm_darknight
from darknight.cli import training, worker
from darknight.cli.app import COMMANDS as LOADERS
from darknight.cli.app import run
from darknight.data import DATASETS
from darknight.errors import FleetError
from darknight.models import MODELS
from darknight.wire.identity import WORKER, Identity

COMMANDS = sorted(LOADERS)


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, which is quicker, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DARKNIGHT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def command(*arguments):
        code = run(list(arguments))
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return command


def test_help_has_an_example_and_the_exit_codes(here):
    done = here("train", "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "darknight train --colluders 2" in done.stdout
    for words in ("0 done", "1 a DarKnight error", "2 bad usage", "130 interrupted", "DARKNIGHT_TRAIN_EPOCHS"):
        assert words in " ".join(done.stdout.split())
    for name in [*MODELS, *DATASETS]:
        assert name in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_command_alone_shows_help_and_version_shows_the_version(here, tmp_path):
    alone = darknight(cwd=tmp_path)
    assert (alone.returncode, alone.stderr) == (2, "")
    assert "train" in alone.stdout
    version = here("--version")
    assert (version.returncode, version.stdout.split()[0]) == (0, "darknight")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--model resnet", "unknown model 'resnet'; use one of "),
        ("--data imagenet", "unknown data 'imagenet'; use one of digits."),
        ("--inputs 0", "inputs=0"),
        ("--colluders 0", "colluders=0"),
        ("--spares -1", "spares=-1"),
        ("--integrity trust", "integrity='trust'"),
        ("--mixing random", "mixing='random'"),
        ("--arithmetic real --noise-std 1e30", "noise_std=1e+30"),
        ("--arithmetic real --noise-std nan", "noise_std=nan"),
        ("--arithmetic real", "needs --noise-std"),
        ("--noise-std 5", "--noise-std is for --arithmetic real"),
        ("--arithmetic paper --inputs 3 --noise-std 5", "takes no --inputs, --noise-std"),
        ("--arithmetic complex", "--arithmetic"),
        ("--leakage-budget 0", "leakage_budget=0.0; needs a positive number of nats"),
        ("--leakage-budget nan", "leakage_budget=nan"),
        ("--arithmetic paper --leakage-budget 1", "gradients in the clear"),
        ("--epochs 0", "epochs 0"),
        ("--epochs ten", "--epochs"),
        ("--batch-size 0", "batch size 0"),
        ("--learning-rate -1", "learning rate -1"),
        ("--seed -1", "seed -1"),
        ("--patience 0", "--patience 0"),
        ("--patience nan", "--patience nan"),
        ("--colour", "--colour"),
    ],
)
def test_bad_settings_are_refused(here, arguments, complaint):
    assert complaint in refused(here("train", *arguments.split()), 2)
    assert not os.listdir()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--inputs 0", "inputs=0"),
        pytest.param("--model resnet", "unknown model", marks=pytest.mark.full),
        pytest.param("--arithmetic real --noise-std 1e30", "noise_std=1e+30", marks=pytest.mark.full),
    ],
)
def test_so_it_is_at_the_command_line(tmp_path, arguments, complaint):
    assert complaint in refused(warm_darknight("train", *arguments.split(), cwd=tmp_path), 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["fleet", "check", "--help"], ["submit", "-h"]])
def test_the_help_shows_no_value_behind_a_flag(here, words):
    done = here(*words)
    assert done.returncode == 0
    assert "--help" in done.stdout
    assert "<bool>" not in done.stdout
    assert "unexpected extra argument" in refused(here("train", "--resume", "true"), 2)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["report"], "darknight report"),
        (["fleet", "check"], "darknight fleet check"),
        (["train", "--epoch", "1"], "darknight train"),
        (["brain"], "darknight"),
    ],
)
def test_a_mistake_in_what_is_written_says_where_it_is_explained(here, words, place):
    assert re.search(rf"[.?] {place} --help says how it is written\.$", refused(here(*words), 2).rstrip())


def test_an_unknown_command_is_refused(here):
    assert "brain" in refused(here("brain"), 2)


def test_an_output_that_cannot_be_a_folder_is_refused(here):
    Path("file").touch()
    assert "cannot write file: " in refused(here("train", "--output", "file"), 1)
    assert "cannot write file/below: " in refused(here("train", "--output", "file/below"), 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_without_permission_is_refused(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    assert "Permission denied" in refused(warm_darknight("train", "--output", "closed/run", cwd=tmp_path), 1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "[train]\nepoch = 3\ncolour = 1\n",
            "unknown key in [train]: colour, epoch; known are arithmetic, augment, batch-size",
        ),
        ("[brain]\nepochs = 3\n", f"unknown table: brain; known are {', '.join(COMMANDS)}."),
        ("train = 3\n", "needs a table, [train]"),
        ("[train]\nepochs = true\n", "epochs in [train] is bool"),
        ("[train]\njson = 1\n", "json in [train] is int; needs true or false"),
        ("[train]\nepochs = [1, 2]\n", "epochs in [train] is list"),
        ("[train\n", "not a TOML file"),
        ("[train]\ninputs = 0\n", "inputs=0"),
        ('[train]\nepochs = "ten"\n', "--epochs"),
    ],
)
def test_a_bad_settings_file_is_refused(here, text, complaint):
    Path("darknight.toml").write_text(text)
    assert complaint in refused(here("train"), 2)


OTHERS = "[train]\ncolour = 1\n[worker]\nthreads = true\n[fleet.bench]\ntimes = -7\n[fleet.check]\nhue = 1\n"


def test_a_command_has_nothing_to_do_with_the_tables_of_others(here, monkeypatch):
    monkeypatch.setattr(worker, "main", lambda given: 17)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    Path("darknight.toml").write_text(OTHERS)
    assert "unknown key in [train]: colour" in refused(here("train"), 2)
    assert "threads in [worker] is bool; needs a number" in refused(here("worker"), 2)
    assert "unknown key in [fleet.check]: hue; known are colluders" in refused(here("fleet", "check", "x.toml"), 2)
    Path("darknight.toml").write_text(OTHERS.replace("hue = 1", ""))
    assert "--times -7" in refused(here("fleet", "bench"), 2)
    Path("darknight.toml").write_text(OTHERS.replace("true", "3"))
    assert here("worker").returncode == 17


@pytest.mark.parametrize("text", [OTHERS, "[brain]\n", "[train\n"])
@pytest.mark.parametrize("command", ["train", "worker", "fleet", "fleet check"])
def test_help_is_there_whatever_is_in_the_file(here, command, text):
    Path("darknight.toml").write_text(text)
    done = here(*command.split(), "--help")
    assert done.returncode == 0
    assert command in done.stdout


def test_patience_reaches_the_fleet(here, monkeypatch):
    given = []

    def no_fleet(*_, patience, **__):
        given.append(patience)
        raise FleetError("none here.")

    monkeypatch.setattr(training, "local_fleet", no_fleet)
    monkeypatch.setattr(training, "connect", no_fleet)
    certificate = Identity.create(WORKER).certificate.decode()
    entry = f"[[worker]]\naddress = 'a:1'\noperator = 'o'\ncertificate = '''{certificate}'''\n"
    Path("fleet.toml").write_text(entry)
    for arguments in ((), ("--patience", "7"), ("--patience", "8.5", "--fleet", "fleet.toml")):
        assert here("train", *arguments).returncode == 1
    assert given == [None, 7, 8.5]


@pytest.mark.full
def test_a_bad_key_at_the_command_line(tmp_path):
    (tmp_path / "darknight.toml").write_text("[train]\nepoch = 3\n")
    assert "unknown key in [train]: epoch" in refused(warm_darknight("train", cwd=tmp_path), 2)


def test_flags_come_before_variables_before_the_file(here, monkeypatch):
    """Each of the three sets `inputs` to something impossible; the refusal shows which of them won."""
    Path("darknight.toml").write_text("[train]\ninputs = -3\n")
    assert "inputs=-3" in refused(here("train"), 2)
    monkeypatch.setenv("DARKNIGHT_TRAIN_INPUTS", "-2")
    assert "inputs=-2" in refused(here("train"), 2)
    assert "inputs=-1" in refused(here("train", "--inputs", "-1"), 2)


def test_fingerprints_are_shown_as_they_are():
    """To rich ":cd:" is a picture of a disc, unless it is told not to draw any."""
    files = Path(training.__file__).parent.glob("*.py")
    made = [call for path in files for call in re.findall(r"\bConsole\(([^)]*)\)", path.read_text())]
    assert len(made) > 5
    assert all("emoji=False" in call for call in made)


def test_a_command_loads_what_it_needs_and_no_other_command():
    script = (
        "import sys\n"
        "from darknight.cli.app import run\n"
        "run(['verify', 'missing'])\n"
        "print(sorted(name for name in sys.modules if name.startswith('darknight.cli.')))\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=clean_environment(), capture_output=True, text=True)
    modules, torch = done.stdout.splitlines()[-2:]
    assert "'darknight.cli.verify'" in modules
    assert "'darknight.cli.train'" not in modules
    assert torch == "False"
