"""darknight submit, as a user types it: a job through a real enclave, and every mistake in one line."""

import json

import pytest

from cli.command import darknight, warm_darknight
from service.enclaves import running_enclave, workplace, write_data, write_job, write_policy

FOUND = ["best.safetensors", "model.safetensors", "summary.json"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    with workplace(tmp_path_factory.mktemp("work")) as folder, running_enclave(folder) as enclave:
        yield folder, enclave.address


def test_a_job_from_submission_to_result(work):
    folder, address = work
    job = write_job(folder, output="one")
    done = darknight("submit", str(job), "--to", address, "--yes", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "SIMULATED evidence: it protects nothing" in done.stderr
    assert "operator north" in done.stderr
    assert "the job is finished" in done.stderr
    files = json.loads(done.stdout)["files"]
    assert sorted(path.rpartition("/")[2] for path in files) == [
        "best.safetensors",
        "model.safetensors",
        "summary.json",
    ]
    summary = json.loads((folder / "one" / "summary.json").read_text())
    assert summary["ledger"]["integrity"]["failed"] == 0
    assert len(summary["epochs"]) == 2

    asked = warm_darknight("submit", "status", str(job), "--to", address, cwd=folder)
    assert asked.returncode == 0
    assert "is finished" in asked.stdout
    (folder / "one" / "summary.json").unlink()
    fetched = warm_darknight("submit", "fetch", str(job), "--to", address, cwd=folder)
    assert fetched.returncode == 0
    assert json.loads((folder / "one" / "summary.json").read_text()) == summary

    predicted = warm_darknight(
        "infer",
        "--checkpoint",
        str(folder / "one" / "model.safetensors"),
        "--data",
        str(folder / "data.npz"),
        "--json",
        cwd=folder,
    )
    assert predicted.returncode == 0, predicted.stderr
    assert json.loads(predicted.stdout)["examples"] == 44


LAYERS = """layers = [
    {type = "Conv2d", in_channels = 1, out_channels = 4, kernel_size = 3},
    {type = "ReLU"},
    {type = "Flatten"},
    {type = "Linear", in_features = 64, out_features = 3},
]"""


def test_a_model_that_the_client_describes_starts_from_its_weights_and_predicts(work):
    """Twice: the second job begins with what the first one found; then a job predicts with the result."""
    folder, address = work
    job = write_job(folder, output="described")
    job.write_text(job.read_text().replace('name = "small-cnn"', LAYERS))
    first = warm_darknight("submit", str(job), "--to", address, "--yes", cwd=folder)
    assert first.returncode == 0, first.stderr
    again = folder / "again.toml"
    weights = 'weights = "described/model.safetensors"'
    again.write_text(job.read_text().replace('"described"', '"again"').replace("[recipe]", f"{weights}\n\n[recipe]"))
    second = warm_darknight("submit", str(again), "--to", address, "--yes", cwd=folder)
    assert second.returncode == 0, second.stderr
    losses = [json.loads((folder / name / "summary.json").read_text())["loss"] for name in ("described", "again")]
    assert losses[1] < losses[0]

    infer = folder / "infer.toml"
    text = again.read_text().replace('"again"', '"predicted"').replace('"train"', '"infer"').replace(LAYERS, "")
    head, _, rest = text.replace("described/", "again/").partition("[recipe]")
    infer.write_text(head + "[scheme]" + rest.partition("[scheme]")[2])
    third = warm_darknight("submit", str(infer), "--to", address, "--yes", cwd=folder)
    assert third.returncode == 0, third.stderr
    rows = json.loads((folder / "predicted" / "predictions.json").read_text())["predictions"]
    assert len(rows) == json.loads((folder / "predicted" / "summary.json").read_text())["examples"]
    local = warm_darknight(
        *("infer", "--checkpoint", "again/model.safetensors", "--data", "data.npz", "--output", "all.json"), cwd=folder
    )
    assert local.returncode == 0, local.stderr


PREDICT = """
kind = "infer"
output = "unlabelled"
policy = "policy.toml"

[data]
sealed = "{sealed}"
key = "{sealed}.key"

[model]
weights = "known/model.safetensors"

[scheme]
inputs = 2
colluders = 1
"""


def test_data_without_labels_from_their_sealing_to_predictions(work):
    """What `darknight infer` predicts on the same file; a training on it is refused before the enclave is asked."""
    folder, address = work
    trained = warm_darknight("submit", str(write_job(folder, output="known")), "--to", address, "--yes", cwd=folder)
    assert trained.returncode == 0, trained.stderr
    write_data(folder, "bare", seed=2, labelled=False)
    assert warm_darknight("seal", "bare.npz", "--out", "bare.sealed", cwd=folder).returncode == 0

    refused = write_job(folder, output="untrained", sealed="bare.sealed")
    done = warm_darknight("submit", str(refused), "--to", "127.0.0.1:1", "--yes", cwd=folder)
    assert done.returncode == 1
    assert "bare.sealed: some or all of its examples have no label" in done.stderr
    assert (
        'Seal the data with labels (an npz with y, a folder of pictures for each class), or predict: kind = "infer"'
        in (" ".join(done.stderr.split()))
    )
    assert "Traceback" not in done.stderr
    assert not (folder / "untrained").exists()

    job = folder / "unlabelled.toml"
    job.write_text(PREDICT.format(sealed="bare.sealed"))
    done = warm_darknight("submit", str(job), "--to", address, "--yes", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "accuracy" not in done.stderr
    assert "44 of 44 examples" in done.stderr
    (folder / "unlabelled" / "predictions.json").unlink()
    assert warm_darknight("submit", "fetch", str(job), "--to", address, cwd=folder).returncode == 0
    rows = json.loads((folder / "unlabelled" / "predictions.json").read_text())["predictions"]
    summary = json.loads((folder / "unlabelled" / "summary.json").read_text())
    assert (len(rows), summary["examples"], "accuracy" in summary) == (44, 44, False)
    assert {row["label"] for row in rows} == {None}
    local = warm_darknight(
        *("infer", "--checkpoint", "known/model.safetensors", "--data", "bare.npz", "--output", "bare.json"),
        *("--inputs", "2"),
        cwd=folder,
    )
    assert local.returncode == 0, local.stderr
    expected = json.loads((folder / "bare.json").read_text())["predictions"]
    assert [row["classes"] for row in rows] == [row["classes"] for row in expected]


def test_nobody_is_asked_without_a_terminal(work):
    folder, address = work
    done = warm_darknight("submit", str(write_job(folder, output="two")), "--to", address, cwd=folder)
    assert done.returncode == 2
    assert "Say --yes" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_enclave_that_the_policy_does_not_know_gets_nothing(work):
    folder, address = work
    write_policy(folder, measurement=b"\x22" * 32)
    try:
        done = warm_darknight("submit", str(write_job(folder, output="three")), "--to", address, "--yes", cwd=folder)
    finally:
        write_policy(folder)
    assert done.returncode == 1
    assert "measurement" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (("small-cnn", "huge-cnn"), 1, "unknown model 'huge-cnn'"),
        (("inputs = 1", "inputs = 9"), 1, "this enclave has 3"),
        (("epochs = 2", "epochs = 0"), 1, "epochs 0"),
        (("epochs = 2", "epochs = 2\nepoks = 3"), 1, "unknown epoks"),
        (("[scheme]", "[skeme]"), 2, "unknown skeme"),
    ],
)
def test_mistakes_in_a_job_are_told_in_one_line(work, change, code, words):
    folder, address = work
    job = write_job(folder, output=f"bad-{abs(hash(change))}")
    job.write_text(job.read_text().replace(*change))
    done = warm_darknight("submit", str(job), "--to", address, "--yes", cwd=folder)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_where_nobody_is(work):
    folder, _ = work
    done = warm_darknight("submit", "status", str(write_job(folder, output="four")), "--to", "127.0.0.1:1", cwd=folder)
    assert done.returncode == 1
    assert "nobody answers" in done.stderr


@pytest.mark.parametrize("words", [["job.toml", "status"], ["status"], ["a", "b", "c"], ["status", "none.toml"]])
def test_words_that_make_no_sense(words, tmp_path):
    done = warm_darknight("submit", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
