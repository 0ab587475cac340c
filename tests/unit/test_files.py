"""Writing a file in one move: what stands there afterwards, and after a failure."""

import os
import stat

import pytest

from rollverify.files import write_atomic


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("é\r\nx\n", "é\r\nx\n".encode()),
        ("", b""),
        (b"\xff\x00", b"\xff\x00"),
        (lambda file: (file.write(b"a"), file.write(b"b")), b"ab"),
    ],
)
def test_text_bytes_and_a_writer_replace_what_was_there(tmp_path, content, written):
    path = tmp_path / "new" / "folder" / "a.txt"
    for _ in range(2):
        write_atomic(path, content)
        assert path.read_bytes() == written
    write_atomic(str(path), "short")
    assert path.read_text() == "short"
    assert os.listdir(path.parent) == ["a.txt"]


def test_a_writer_that_fails_half_way_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "a.txt"
    write_atomic(path, "old")

    def fail(file):
        file.write(b"new")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_atomic(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_old_file_stands_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    seen = []
    write_atomic(path, lambda file: (file.write(b"new"), seen.append(path.read_text())))
    assert (seen, path.read_text()) == (["old"], "new")


def test_two_writers_of_one_path_do_not_share_a_draft(tmp_path):
    path = tmp_path / "a.txt"
    write_atomic(path, lambda file: (file.write(b"first"), write_atomic(path, "second")))
    assert path.read_text() == "first"  # It was complete last.
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_permissions_follow_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_atomic(tmp_path / "a.txt", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == mode


def test_what_cannot_be_written_is_an_os_error_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "a.txt", tmp_path / "folder"):
        with pytest.raises(OSError):
            write_atomic(path, "x")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_contents_and_name_reach_the_disk_in_that_order(tmp_path, monkeypatch):
    synced = []

    def record(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append((is_folder, (tmp_path / "a.txt").exists()))

    monkeypatch.setattr(os, "fsync", record)
    write_atomic(tmp_path / "a.txt", "x")
    assert synced == [(False, False), (True, True)]  # The file before its name, then the folder.
