"""Files in and out of a sandbox."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

import boxwood
from boxwood import _tar

from fakeserver import FakeDaemon, Fault


def test_read_and_write(sandbox: boxwood.Sandbox) -> None:
    turn = sandbox.write_file("/work/a", "text")
    assert turn.verdict == "files"
    sandbox.write_file("/work/a", b"\xff", append=True)
    assert sandbox.read_file("/work/a") == b"text\xff"
    sandbox.write_file("/work/run", "#!/bin/sh\necho hi\n", mode=0o755)
    assert sandbox.run("work/run").stdout == b"hi\n"
    with pytest.raises(boxwood.NotFound):
        sandbox.read_file("/work/none")


@pytest.mark.parametrize("size", [0, 1, 4 << 20, (4 << 20) + 1, 9_000_000])
def test_sizes(sandbox: boxwood.Sandbox, size: int) -> None:
    data = os.urandom(size)
    sandbox.write_file("/work/big", data)
    assert sandbox.read_file("/work/big") == data


def test_a_large_append_is_refused_here(sandbox: boxwood.Sandbox) -> None:
    with pytest.raises(boxwood.InvalidArgument, match="append"):
        sandbox.write_file("/work/big", bytes(5 << 20), append=True)


def make_folder(folder: Path) -> None:
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "sub" / "data").write_bytes(os.urandom(3_000_000))
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o755)
    (folder / "link").symlink_to("sub/data")
    (folder / ("long" * 60)).write_text("a name longer than a plain header holds")
    (folder / os.fsdecode(b"odd\xff")).write_text("a name that isn't UTF-8")
    os.mkfifo(folder / "pipe")


def test_a_folder_there_and_back(sandbox: boxwood.Sandbox, tmp_path: Path) -> None:
    here, back = tmp_path / "here", tmp_path / "deep" / "back"
    make_folder(here)
    turn = sandbox.upload(here, "/work/new")
    assert turn.node.id == sandbox.head_id
    (back / "sub").mkdir(parents=True)
    (back / "kept").write_text("kept")
    assert sandbox.download("/work/new", back) == []
    assert (back / "sub/data").read_bytes() == (here / "sub/data").read_bytes()
    assert os.readlink(back / "link") == "sub/data"
    assert os.access(back / "tool", os.X_OK)
    names = {p.name for p in back.iterdir()}
    assert names == {p.name for p in here.iterdir()} - {"pipe"} | {"kept"}
    assert not list(tmp_path.glob("**/.boxwood-*"))


def test_a_file_there_and_back(sandbox: boxwood.Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("content")
    sandbox.upload(source, "/work/renamed.txt")
    sandbox.upload(source, "/work/")
    assert sandbox.read_file("/work/source.txt") == sandbox.read_file("/work/renamed.txt") == b"content"
    sandbox.download("/work/renamed.txt", tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text() == "content"
    sandbox.download("/work/renamed.txt", tmp_path)
    assert (tmp_path / "renamed.txt").read_text() == "content"


def test_transfers_inside_a_turn(sandbox: boxwood.Sandbox, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    with sandbox.turn() as t:
        t.upload(tmp_path / "file", "/work/up")
        t.download("/work/up", tmp_path / "down")
        t.write_file("/work/big", bytes(5 << 20))
    assert (tmp_path / "down").read_text() == "content"
    assert t.node.depth == 1


def test_what_is_missing_is_said(sandbox: boxwood.Sandbox, tmp_path: Path) -> None:
    with pytest.raises(boxwood.InvalidArgument, match="no '/no/such'"):
        sandbox.upload("/no/such", "/work")
    with pytest.raises(boxwood.NotFound):
        sandbox.download("/no/such", tmp_path / "x")
    assert list(tmp_path.glob("*x*")) == []


def test_a_file_that_shrinks_under_an_upload(
    sandbox: boxwood.Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(os, "fstat", lambda fd: type("S", (), {"st_size": 4 << 20})())
    with pytest.raises(boxwood.InvalidArgument, match="shrank"):
        sandbox.upload(tmp_path / "file", "/work/")


def hostile(**fields: object) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        good = tarfile.TarInfo("good")
        archive.addfile(good)
        info = tarfile.TarInfo()
        for name, value in fields.items():
            setattr(info, name, value)
        archive.addfile(info)
    return data.getvalue()


HOSTILE = {
    "climbing path": {"name": "../out"},
    "absolute link": {"name": "l", "type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    "climbing link": {"name": "l", "type": tarfile.SYMTYPE, "linkname": "../../x"},
    "hard link outside": {"name": "l", "type": tarfile.LNKTYPE, "linkname": "../x"},
    "device": {"name": "d", "type": tarfile.CHRTYPE},
}


@pytest.mark.parametrize("entry", HOSTILE.values(), ids=HOSTILE)
def test_hostile_downloads(tmp_path: Path, entry: dict[str, object]) -> None:
    target = tmp_path / "in" / "target"
    data = hostile(**entry)
    with pytest.raises(boxwood.UnsafeEntry) as caught:
        _tar.unpack([data], "/remote", target, "raise")
    assert isinstance(caught.value, boxwood.AgentError)
    assert repr(entry["name"]) in str(caught.value)
    assert not target.exists()
    assert _tar.unpack([data], "/remote", target, "skip") == [entry["name"]]
    assert [p.name for p in target.iterdir()] == ["good"]
    assert [p.name for p in tmp_path.rglob("*")] == ["in", "target", "good"]


def test_a_link_in_the_target_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "target" / "sub").symlink_to(tmp_path / "outside")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("sub/file"))
    _tar.unpack([data.getvalue()], "/remote", tmp_path / "target", "raise")
    assert list((tmp_path / "outside").iterdir()) == []
    assert (tmp_path / "target" / "sub" / "file").exists()


def test_a_download_that_breaks_off_changes_nothing(
    daemon: FakeDaemon, sandbox: boxwood.Sandbox, tmp_path: Path
) -> None:
    sandbox.write_file("/work/big", os.urandom(100_000))
    daemon.fake.faults["Download"].append((Fault("INTERNAL", "broken"), 20))
    with pytest.raises(boxwood.InternalError):
        sandbox.download("/work", tmp_path / "target")
    assert list(tmp_path.glob("t*")) == []
    assert not list(tmp_path.glob(".boxwood-*"))
