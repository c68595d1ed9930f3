"""Checkpoints on s3://, against a server of moto's on the loopback.

Needs `pip install s3fs 'moto[s3]' flask flask-cors`, which the test extra leaves out: 110 MB.
"""

from __future__ import annotations

import importlib.util
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.storage import Storage
from shoal.errors import CheckpointError
from support.remote_life import shoal_run, store_life, training_life
from support.tiny_job import TinyJob

LACKING = [
    name
    for name in ("s3fs", "moto", "flask", "flask_cors")
    if importlib.util.find_spec(name) is None
]
if LACKING:
    pytest.skip(f"not installed: {', '.join(LACKING)}", allow_module_level=True)

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@dataclass
class Server:
    """A server of S3, and what the environment says to reach it."""

    url: str
    process: Any

    def bucket(self) -> str:
        """A new one's URL."""
        import s3fs

        name = uuid.uuid4().hex
        s3fs.S3FileSystem().mkdir(name)
        return f"s3://{name}"

    def check_keys(self, after: str) -> None:
        """Let it look at keys after so many requests; it knows none."""
        asked = f"{self.url}/moto-api/reset-auth"
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(asked, after.encode(), plain, method="POST")
        with urllib.request.urlopen(request, timeout=120):
            pass


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    from moto.server import ThreadedMotoServer

    process = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    process.start()
    host, port = process.get_host_and_port()
    yield Server(f"http://{host}:{port}", process)
    process.stop()


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    import s3fs

    for key in KEYS:
        monkeypatch.setenv(key, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    yield running
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_store_from_first_to_last(server: Server):
    store_life(f"{server.bucket()}/runs/job")


def test_a_run_goes_on_from_a_store(server: Server, tmp_path: Path):
    training_life(f"{server.bucket()}/job", tmp_path / "runs")


def test_a_file_of_several_parts_and_one_that_is_given_up(server: Server):
    storage = Storage(f"{server.bucket()}/job")
    data = bytes(range(256)) * (200 << 10)  # 50 MB
    with storage.create("x") as file:
        for at in range(0, len(data), 1 << 20):
            file.write(memoryview(data)[at : at + (1 << 20)])
    assert storage.read("x") == data and storage.size("x") == len(data)
    for size in (10, len(data)):
        with pytest.raises(KeyError), storage.create("y") as file:
            file.write(data[:size])
            raise KeyError
    assert storage.files() == ("x",)


def test_a_bucket_that_is_not_there(server: Server):
    url = f"s3://{uuid.uuid4().hex}/job"
    job = TinyJob()
    for call in (lambda: job.save(url), lambda: job.load(url), Storage(url).folders):
        with pytest.raises(CheckpointError, match=rf"{url}.*got missing.*a bucket must exist"):
            call()
    code, out = shoal_run("ckpt", "inspect", url)
    assert code == 2 and "got missing" in " ".join(out.split())


def test_a_run_does_not_start_without_its_bucket(server: Server, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"got missing.*a bucket must exist"):
        _refused_run(f"s3://{uuid.uuid4().hex}/job", tmp_path)


@pytest.mark.parametrize("keys", ["wrong", "none"])
def test_credentials(server: Server, keys: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import s3fs

    url = f"{server.bucket()}/job"
    job = TinyJob()
    job.save(url)
    if keys == "none":
        for key in KEYS:
            monkeypatch.delenv(key)
        monkeypatch.setenv("HOME", str(tmp_path))  # nor in its files
    s3fs.S3FileSystem.clear_instance_cache()
    said = "no permission" if keys == "wrong" else "Unable to locate credentials"
    try:
        if keys == "wrong":
            server.check_keys("0")
        calls = (lambda: job.save(url, full=True), lambda: TinyJob().load(url))
        for call in calls:
            with pytest.raises(CheckpointError, match=rf"{url}.*{said}.*Check the .*credentials"):
                call()
        with pytest.raises(CheckpointError, match=said):
            _refused_run(url, tmp_path)
    finally:
        server.check_keys("1000000000")
    assert not (tmp_path / "runs").exists()


def test_a_server_that_does_not_answer(server: Server, monkeypatch: pytest.MonkeyPatch):
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"Could not connect.*Check the address"):
        TinyJob().load("s3://bucket/job")


def _refused_run(url: str, folder: Path) -> None:
    code, out = shoal_run(
        "train",
        "examples/flights.yaml",
        "data.max_examples=100",
        f"output.dir={folder / 'runs'}",
        f"checkpoint.dir={url}",
    )
    assert code == 2
    raise CheckpointError(" ".join(out.split()))
