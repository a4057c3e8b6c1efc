"""Messages of the library that reach Python: they name arguments of Python, never options of the program or fields of C."""

from __future__ import annotations

import io
import os
import pathlib
import re
import struct
import subprocess
import sys
import tarfile
import warnings
import zlib
from typing import Any, Callable, Iterator, Optional

import pytest
from conftest import DIGITS, PROGRAM, ROOT

import fdsl
from fdsl import _library

SERVER = ROOT / "tests" / "remote_server.py"
FOREIGN = re.compile(r"(^|[^-\w])--[a-z]|out_res|\bset fit\b|shard_bytes|\bheld\b|FDSL_|fdsl_")


def message_of(call: Callable[[], Any]) -> str:
    """Returns the warnings of a call and the message of its error, which no word of another interface may be in."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            call()
            error = ""
        except (ValueError, fdsl.Error) as raised:
            error = str(raised)
    text = "\n".join([str(one.message) for one in seen] + [error])
    foreign = FOREIGN.search(text.replace("tar --", ""))  # advice to use an option of tar
    assert not foreign, text
    return text


def png(width: int, height: int, channels: int = 3) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    rows = zlib.compress(bytes(height * (1 + channels * width)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def npy(kind: str, *shape: int) -> bytes:
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    head += " " * (-(len(head) + 11) % 64) + "\n"
    count = int(kind[-1])
    for extent in shape:
        count *= extent
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head.encode() + bytes(count)


class Files:
    """Writes files of data sets."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    def put(self, name: str, data: bytes = b"") -> pathlib.Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def folder(self, name: str, **contents: bytes) -> pathlib.Path:
        """Writes files into a folder; in their names, "__" stands for a slash and "_" for a dot."""
        for file, data in contents.items():
            self.put(f"{name}/" + file.replace("__", "/").replace("_", "."), data)
        return self.root / name

    def tar(self, name: str, **members: bytes) -> pathlib.Path:
        path = self.put(name)
        with tarfile.open(path, "w") as archive:
            for member, data in members.items():
                info = tarfile.TarInfo(member.replace("_", "."))
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return path


@pytest.fixture
def files(tmp_path: pathlib.Path) -> Files:
    return Files(tmp_path)


def test_data_sets_on_a_disk(files: Files) -> None:
    image = png(8, 8)
    put, tar, folder = files.put, files.tar, files.folder
    cases: list[tuple[Any, str]] = [
        (files.root / "none", "No such file"),
        (f"{files.root}/x-{{0..3}}.tar", "patterns are only for URLs"),
        (put("file.txt", b"x"), "name a folder, a shard"),
        (folder("empty", README=b""), "no samples found"),
        (folder("broken", _prepare=b"x"), "was interrupted"),
        (folder("two", a_index=b"", b_index=b""), "keep each data set in its own folder"),
        (folder("lists", a_wids_json=b"{", b_wids_json=b"{"), "name one of them"),
        (folder("list", a_wids_json=b"{}"), "a.wids.json"),
        (folder("gone", a_index=b"x"), "a.index"),
        (folder("lfs", a_tar=b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n"), "Git LFS"),
        (folder("cut", a_tar=bytes(100)), "a.tar"),
        (folder("page", a_tar=b"<html>" + bytes(600)), "HTML"),
        (tar("twice/a.tar", a_png=image, b_png=image, a_cls=b"1").parent, "must be adjacent"),
        (tar("same/a.tar", a_png=image, a_PNG=image).parent, "twice"),
        (folder("classes", one__a_png=image, two__x_txt=b""), "has no image"),
    ]
    os.symlink("/none/x.png", put("link/0/a.png", image).parent / "b.png")
    os.symlink("/none", files.root / "link" / "1")
    cases.append((files.root / "link", "a symbolic link to '/none'"))
    os.symlink("..", put("loop/0/a.png", image).parent / "up")
    cases.append((files.root / "loop", "links back"))
    os.mkfifo(put("pipe/0/a.png", image).parent / "b.png")
    cases.append((files.root / "pipe", "not a regular file"))
    with tarfile.open(put("special/a.tar"), "w") as archive:
        for kind, name in ((tarfile.SYMTYPE, "a.png"), (tarfile.LNKTYPE, "b.png")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "none"
            archive.addfile(info)
    cases.append((files.root / "special", "is a symbolic link"))
    for path, words in cases:
        kind = fdsl.Shards if list(pathlib.Path(path).glob("*.tar")) or not os.path.isdir(path) else fdsl.Folder
        text = message_of(lambda path=path, kind=kind: kind(path))
        assert words in text, (str(path), text)
    images = folder("f", one__a_png=image, one__notes_txt=b"")
    assert "not images" in message_of(lambda: fdsl.Folder(images))
    assert "class folders" in message_of(lambda: fdsl.Shards(images))
    shard = tar("s/a.tar", a_png=image, a_txt=b"one\ntwo", a_json=b'{"a": 1.5}')
    assert "class folders" in message_of(lambda: fdsl.Folder(shard.parent))
    for arguments, words in (
        ({"image": "png:x"}, "which only label can"),
        ({"image": "gif"}, "for image gif"),
        ({"image": ".png"}, "without the dot"),
        ({"label": "a,b"}, "';'"),
        ({"label": "json"}, "json:FIELD"),
        ({"label": ";".join("abcdefghijklmnopqrstuvwxyz")}, "more than"),
        ({"label": "txt"}, "label"),
        ({"label": "json:b"}, "with label json:FIELD"),
        ({"label": "json:a"}, "integer"),
        ({"cache_bytes": 5}, "cache_dir"),
    ):
        text = message_of(lambda arguments=arguments: list(fdsl.Loader(fdsl.Shards(shard, **arguments), 1)))  # type: ignore
        assert words in text, (arguments, text)


def test_images(files: Files) -> None:
    tar, folder, small = files.tar, files.folder, fdsl.Resize(8)
    for path, arguments, words in (
        (folder("a", one__a_png=png(8, 8), one__b_png=png(9, 8)), {}, "set transforms and channels"),
        (folder("b", one__a_png=png(20000, 2)), {"transforms": fdsl.CenterCrop(64)}, "is too long for fdsl.CenterCrop"),
        (folder("c", one__a_png=b"\x89PNG\r\n\x1a\nx"), {"transforms": small}, "a.png"),
        (folder("d", one__a_jpg=b"\xff\xd8\xff"), {"transforms": small}, "a.jpg"),
        (folder("e", one__a_webp=b"RIFF1234WEBP"), {"transforms": small}, "a.webp"),
        (folder("g", one__a_bmp=b"BM"), {"transforms": small}, "a.bmp"),
        (tar("h/a.tar", a_npy=npy("<f2", 3, 8, 8), a_cls=b"0").parent, {"transforms": small}, "as bytes"),
        (tar("i/a.tar", a_npy=npy("<f4", 3, 8, 8), a_cls=b"0").parent, {}, "streams deliver images and clips of bytes"),
        (tar("j/a.tar", a_npy=npy("<f2", 3, 8, 8, 2), a_cls=b"0").parent, {"transforms": small}, "as bytes"),
        (tar("k/a.tar", a_npy=npy("|u1", 5, 8, 8), a_cls=b"0").parent, {"transforms": small}, "channels"),
        (folder("m", one__a_png=png(8, 8)), {"drop_last": True, "transforms": small, "batch_size": 9}, "batch_size"),
    ):  # fmt: skip
        kind: Any = fdsl.Shards if list(pathlib.Path(path).glob("*.tar")) else fdsl.Folder
        text = message_of(lambda: list(fdsl.Loader(kind(path), **{"batch_size": 2, **arguments})))  # noqa: B023
        assert words in text, (str(path), text)
    source = fdsl.Folder(files.root / "m")
    state = fdsl.Loader(source, 1, transforms=small).state_dict()
    for changes in ({"transforms": fdsl.Resize(9)}, {"seed": 1}, {"shuffle": False}, {"lanes": 2}, {"batch_size": 2}):
        arguments = {"batch_size": 1, "transforms": small, **changes}
        loader = fdsl.Loader(source, **arguments)
        assert "state: " in message_of(lambda: loader.load_state_dict(state))  # noqa: B023


def test_every_text_that_is_replaced_is_one_of_the_library() -> None:
    library = pathlib.Path(fdsl.library_path()).read_bytes()
    for text in _library._WORDS:
        assert text.encode() in library, text


@pytest.fixture
def server(files: Files) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(files.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    process.kill()
    process.communicate()


@pytest.mark.skipif(not SERVER.exists(), reason="the server for tests is missing")
def test_data_sets_at_a_url(files: Files, server: str, monkeypatch: Any) -> None:
    for name, value in (
        ("no_proxy", "127.0.0.1"), ("AWS_ENDPOINT_URL", server), ("AWS_REGION", "eu-test-1"),
        ("AWS_ACCESS_KEY_ID", "AKIDTEST"), ("AWS_SECRET_ACCESS_KEY", "wrong"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    try:
        fdsl.Shards(f"{server}/web/none.tar")
    except fdsl.Unavailable as error:
        pytest.skip(str(error))
    except fdsl.Error:
        pass
    files.tar("a.tar", a_png=png(8, 8), a_cls=b"1")
    cases: list[tuple[str, Optional[str], str]] = [
        ("{u}/web/none.tar", None, "check the address"),
        ("{u}/web/none-{0..3}.tar", None, "braces"),
        ("{u}/web/*.tar", None, "name the numbers"),
        ("{u}/web/", None, "name the shards"),
        ("{u}/list/x.tar", None, "HTML"),
        ("{u}/changing/a.tar", None, "changed while it was read"),
        ("{u}/endless/x.tar", None, "sends more than"),
        ("{u}/secure/a.tar", None, "SSL"),
        ("{u}/loop/x.tar", None, "redirections"),
        ("{u}/busy/x.tar", None, "tried 2 times"),
        ("{u}/headers/400000?1", None, "name the shards"),
        ("{u}/unnamed/a.tar", None, "another range"),
        ("{u}/account/box/?sv=1&sig=wrong", None, "access denied"),
        ("{u}/web/a-{0.tar", None, "counterpart"),
        ("{u}/web/a-{9..1}.tar", None, "counts down"),
        ("{u}/web/a-{0..9999999}.tar", None, "files"),
        ("{u}/web/{0..999}{0..9999}.tar", None, "files"),
        ("{u}/web/{a,a}.tar", None, "twice"),
        ("{u}/web/a.tar,{u}/web/b.tar", None, "list of URLs"),
        ("http://127.0.0.1:1/x.tar", None, "connect"),
        ("http://me:secret@127.0.0.1/x.tar", None, "user or password"),
        ("ftp://x/a.tar", None, "unknown kind of URL"),
        ("az://x/a.tar", None, "unknown kind of URL"),
        ("gcs://x/a.tar", None, "unknown kind of URL"),
        ("s3://", None, "bucket"),
        ("s3://bucket/", None, "s3://bucket"),
        ("s3://a?b", None, "query"),
        ("https://", None, "host"),
        ("{u}/web/a.tar", "file", "name a folder"),
        ("{u}/web/a.tar", "none/cache", "parent folders"),
        ("{u}/web/a.tar", "/proc/x", "cache_dir"),
        ("{u}/web/a.tar", "cache", "raise the limit"),
    ]
    files.put("file")
    for url, cache, words in cases:
        folder = cache and str(files.root / cache)
        limit = 10 if cache == "cache" else None
        text = message_of(
            lambda: fdsl.Shards(url.replace("{u}", server), cache_dir=folder, cache_bytes=limit)  # noqa: B023
        )
        assert words in text, (url, text)


def test_an_index_of_the_program(tmp_path: pathlib.Path) -> None:
    if not os.path.exists(PROGRAM):
        pytest.skip("the program is missing")
    target = tmp_path / "set"
    subprocess.run(
        [PROGRAM, "--prepare", str(target), "--from", "digits", "--samples", str(DIGITS), "--store", "shards", "--shards", "2"],
        check=True, capture_output=True,
    )  # fmt: skip
    shards = sorted(target.glob("*.tar"))
    shards[1].rename(tmp_path / "kept")
    assert "the shard is missing" in message_of(lambda: fdsl.Shards(target))
    shards[1].write_bytes(b"x" * 2000)
    assert "its index says" in message_of(lambda: fdsl.Shards(target))
    index = next(target.glob("*.index"))
    index.write_bytes(index.read_bytes()[:-20])
    assert index.name in message_of(lambda: fdsl.Shards(target))
