"""Where outputs may go."""

from pathlib import Path

import pytest

from thawline.errors import DataError
from thawline.folders import place_for, resumable_folder, whole_folder


@pytest.mark.parametrize("made", [whole_folder, resumable_folder])
def test_a_folder_never_takes_the_place_of_a_file(made, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("seed: 0")
    with pytest.raises(DataError, match="something that is no folder"), made(file):
        pass
    assert file.read_text() == "seed: 0"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("made", [whole_folder, resumable_folder])
def test_a_folder_takes_the_place_of_its_like_or_of_an_empty_one_alone(made, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="home holds something that no stage made"), made(home):
        pass
    assert (home / "thesis.txt").read_text() == "years of work"
    (home / "thesis.txt").rename(home / "model.json")
    for _ in range(2):
        with made(home) as folder:
            folder.mkdir(exist_ok=True)
        assert list(home.iterdir()) == []


def test_a_file_takes_the_place_of_files_alone(tmp_path):
    for taken in (tmp_path, Path("/dev/null")):
        with pytest.raises(DataError, match="something that is no file"):
            place_for(taken, folder=False)
    old = tmp_path / "scores.parquet"
    old.touch()
    assert place_for(old, folder=False) == old


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file cannot be made \(File exists\)"):
        place_for(tmp_path / "file" / "scores.parquet", folder=False)
    # Root may write anywhere.
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(DataError, match="no permission to write into"):
        place_for(tmp_path / "new" / "scores.parquet", folder=False)
