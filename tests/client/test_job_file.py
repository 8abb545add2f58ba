"""The job file: what it says, and every mistake in it in words."""

import pytest

from darknight.client.job_file import read_job_file
from darknight.errors import UsageError
from service.enclaves import write_job


def test_paths_are_relative_to_the_file(tmp_path):
    file = read_job_file(write_job(tmp_path))
    assert (file.sealed, file.key) == (tmp_path / "sealed", tmp_path / "sealed.key")
    assert (file.output, file.policy) == (tmp_path / "result", tmp_path / "policy.toml")
    assert file.kind == "train"
    assert file.recipe == {"epochs": 2, "batch_size": 9, "learning_rate": 0.05, "seed": 5}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('kind = "train"', "", "no kind"),
        ('kind = "train"', 'king = "train"', "unknown king"),
        ('output = "result"', "", "no output"),
        ("[scheme]", "[sheme]", "unknown sheme"),
        ('sealed = "sealed"', "", "no sealed"),
        ('name = "small-cnn"', "", "needs either name"),
        ('name = "small-cnn"', 'nane = "small-cnn"', "unknown nane"),
        ('name = "small-cnn"', 'name = "small-cnn"\nlayers = []', "needs either name"),
        ("save_every = 0.0", 'save_every = "0"', "save_every needs a number"),
        ("epochs = 2", "epochs = 2\naugment = 1", "augment needs true or false"),
        ("[data]", "[data", "not a TOML file"),
    ],
)
def test_mistakes_are_told_in_words(tmp_path, old, new, words):
    path = write_job(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UsageError, match=words) as caught:
        read_job_file(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_job_file(tmp_path / "none.toml")
