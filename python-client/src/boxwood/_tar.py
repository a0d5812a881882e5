"""Tar streams: packing what is local lazily, unpacking what a sandbox sent with distrust."""

from __future__ import annotations

import io
import os
import posixpath
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from . import errors

CHUNK = 1 << 20


def pack(local: Path, name: str | None = None) -> Iterator[bytes]:
    """Packs a file (under `name`) or what lies in a folder, a chunk of 1 MiB at most at a time.

    Owners are left out: what arrives belongs to the sandbox's user. Sockets, pipes
    and devices are left out, links are kept as links.
    """
    if local.is_dir():
        for folder, folders, files in os.walk(local):
            folders.sort()
            for entry in sorted(files) + folders:
                path = Path(folder, entry)
                yield from _entry(path, str(path.relative_to(local)))
    else:
        yield from _entry(Path(os.path.realpath(local)), name or local.name)
    yield bytes(2 * tarfile.BLOCKSIZE)


def pack_bytes(name: str, content: bytes, mode: int) -> Iterator[bytes]:
    """Packs one file that is in memory."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    yield _header(info)
    for at in range(0, len(content), CHUNK):
        yield content[at : at + CHUNK]
    yield bytes(-len(content) % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _entry(path: Path, name: str) -> Iterator[bytes]:
    status = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        yield _header(info)
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        yield _header(info)
    elif stat.S_ISREG(status.st_mode):
        with open(path, "rb") as file:
            left = info.size = os.fstat(file.fileno()).st_size
            yield _header(info)
            while left:
                chunk = file.read(min(CHUNK, left))
                if not chunk:
                    raise errors.invalid(f"{path} shrank while it was being uploaded")
                left -= len(chunk)
                yield chunk
        if padding := -info.size % tarfile.BLOCKSIZE:
            yield bytes(padding)


class ChunkReader(io.RawIOBase):
    """A readable file over an iterator of chunks."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fills the buffer from the current chunk; 0 at the end."""
        while not self._rest:
            try:
                self._rest = memoryview(next(self._chunks))
            except StopIteration:
                return 0
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def unpack(chunks: Iterable[bytes], remote: str, local: Path, unsafe: Literal["raise", "skip"]) -> list[str]:
    """Unpacks a stream beside its target and moves it into place when all of it is there.

    A single file arrives as `local` (or in it, if that is a folder); a folder's
    content arrives in the folder `local`, made if missing.

    Returns:
        The entries that were skipped as unsafe.
    """
    if not hasattr(tarfile, "data_filter"):
        raise errors.unsupported(
            "this Python can't unpack a foreign archive safely", "use 3.10.12, 3.11.4, 3.12 or later"
        )
    skipped: list[str] = []

    def judge(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
        try:
            return tarfile.data_filter(member, target)
        except tarfile.FilterError as problem:
            if unsafe == "raise":
                raise errors.unsafe_entry(f"refusing {member.name!r} of the download: {problem}") from None
            skipped.append(member.name)
            return None

    local.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".boxwood-", dir=local.absolute().parent) as scratch:
        base = posixpath.basename(remote.rstrip("/"))
        single: str | None = None
        folder = False
        with tarfile.open(fileobj=io.BufferedReader(ChunkReader(chunks), CHUNK), mode="r|") as archive:
            for number, member in enumerate(archive):
                # The first entry is what was asked for, under its own name: a file, or a folder.
                if number == 0 and member.isdir() and member.name.strip("/") in (base, "."):
                    folder = True
                    continue
                single = member.name if number == 0 and member.name == base else None
                checked = judge(_below(member, base) if folder else member, scratch)
                if checked is not None:
                    archive.extract(checked, scratch, filter="fully_trusted")
        if single is not None and single not in skipped:
            target = local / single if local.is_dir() else local
            os.replace(Path(scratch, single), target)
        else:
            _merge(Path(scratch), local)
    return skipped


def _below(member: tarfile.TarInfo, base: str) -> tarfile.TarInfo:
    """The member named from the folder on, and with it what a hard link points to."""
    prefix = base + "/"
    name, linkname = member.name.removeprefix(prefix), member.linkname
    if member.islnk():
        linkname = linkname.removeprefix(prefix)
    return member.replace(name=name, linkname=linkname, deep=False)


def _merge(source: Path, target: Path) -> None:
    """Moves what lies in `source` into `target`, folder by folder; files are replaced."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        there = target / entry.name
        if entry.is_dir() and not entry.is_symlink() and there.is_dir() and not there.is_symlink():
            _merge(entry, there)
            continue
        if there.is_dir() and not there.is_symlink():
            shutil.rmtree(there)
        elif there.is_symlink() or (entry.is_dir() and there.exists()):
            there.unlink()  # a link there is replaced, never followed
        os.replace(entry, there)


def read(path: Path) -> Iterator[bytes]:
    """A file's content, in pieces."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def save(chunks: Iterable[bytes], path: str | os.PathLike[str]) -> int:
    """Writes a file that is there once it is whole; gives its size."""
    target = Path(path)
    size = 0
    handle, part = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                size += file.write(chunk)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise
    return size
