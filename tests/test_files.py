"""Files are created, never followed, and JSON of unknown origin is read within limits."""

import os
import stat

import pytest

from zoo import _files


@pytest.fixture
def victim(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "victim"
    file.write_text("precious")
    return file


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["file", "file.part", "file.{pid}.part", "file.partial"])
def test_write_text_follows_no_link(victim, tmp_path, name):
    name = name.format(pid=os.getpid())
    (tmp_path / name).symlink_to(victim)
    _files.write_text(tmp_path / "file", "new")
    assert victim.read_text() == "precious" and (tmp_path / "file").read_text() == "new"
    assert not (tmp_path / "file").is_symlink() and list_names(tmp_path) == sorted({"elsewhere", "file", name})


def test_write_text_creates_exclusively_even_at_a_known_name(victim, tmp_path, monkeypatch):
    monkeypatch.setattr(_files.secrets, "token_hex", lambda _: "known")
    (tmp_path / "file.known.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        _files.write_text(tmp_path / "file", "new")
    assert victim.read_text() == "precious" and not (tmp_path / "file").exists()


def test_write_text_into_a_linked_directory(victim, tmp_path):
    (tmp_path / "link").symlink_to(victim.parent)
    _files.write_text(tmp_path / "link" / "file", "new")
    assert (victim.parent / "file").read_text() == "new"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((victim.parent / "file").stat().st_mode) == 0o666 & ~umask


def test_create_files_that_fails_leaves_no_trace(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="full"), _files.create_files(tmp_path) as create:
        create("a").write(b"new")
        create("b").write(b"new")
        raise OSError("the disk is full")
    assert list_names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_append_and_copy_follow_no_link(victim, tmp_path):
    (tmp_path / "log").symlink_to(victim)
    with pytest.raises(OSError):
        _files.open_to_append(tmp_path / "log")
    for _ in range(2):
        with _files.open_to_append(tmp_path / "other") as file:
            file.write(b"line\n")
    assert (tmp_path / "other").read_text() == "line\nline\n"
    _files.copy_file(tmp_path / "other", tmp_path / "log")
    assert victim.read_text() == "precious" and (tmp_path / "log").read_text() == "line\nline\n"


def make_pipe(path):
    os.mkfifo(path)


def make_huge(path):
    with path.open("wb") as file:
        file.truncate(2**31)


SPECIAL = {
    "pipe": (make_pipe, "is a pipe: expected a file"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "is a device: expected a file"),
    "directory": (lambda path: path.mkdir(), "is a directory: expected a file"),
    "sparse file": (make_huge, "has 2,147,483,648 bytes: expected at most 100,000,000"),
    "empty file": (lambda path: path.write_bytes(b""), "is damaged"),
    "bytes": (lambda path: path.write_bytes(b"\xff\xfe{"), "is damaged"),
    "nested lists": (lambda path: path.write_bytes(b"[" * 10**6), "is damaged: values are nested more than 100 deep"),
    "nested objects": (
        lambda path: path.write_bytes(b'{"a":' * 101 + b"{}" + b"}" * 101),
        "is damaged: values are nested more than 100 deep",
    ),
    "huge number": (lambda path: path.write_bytes(b"9" * 10**5), "is damaged: Exceeds the limit"),
}


@pytest.mark.parametrize(("make", "message"), SPECIAL.values(), ids=SPECIAL)
def test_read_json_refuses_special_and_damaged_files(tmp_path, make, message):
    make(tmp_path / "config.json")
    with pytest.raises(ValueError, match="config.json") as caught:
        _files.read_json(tmp_path / "config.json")
    assert message in str(caught.value)


def test_read_json_reads_nested_values_and_links(tmp_path):
    (tmp_path / "blob").write_bytes(b"[" * 100 + b"]" * 100)
    (tmp_path / "link").symlink_to("blob")
    assert _files.read_json(tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        _files.read_json(tmp_path / "nowhere")


def test_write_json_of_a_name_that_is_no_text(tmp_path):
    _files.write_json(tmp_path / "file", {"data": os.fsdecode(b"caf\xe9"), "loss": float("nan")})
    assert _files.read_json(tmp_path / "file") == {"data": "caf\udce9", "loss": "nan"}


def test_file_that_cannot_be_created_is_named():
    with pytest.raises(OSError) as raised:
        _files.write_text(_files.Path("/proc/mine.txt"), "text")
    assert raised.value.filename == "/proc/mine.txt"
