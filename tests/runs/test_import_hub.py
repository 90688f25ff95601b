"""Models of the Hub by name: a server on this machine speaks its endpoints."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.runs import hugging_face as importing
from tests.kit import command, fails
from tests.models import random_run

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "someone/Tiny-1.0"


class Hub(ThreadingHTTPServer):
    """The files of one model; the first answer with a file in `cut` ends halfway."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.sent: list[tuple[str, str]] = []
        self.posted: list[tuple[str, str]] = []
        self.existing: set[str] = set()

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing."""


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].lstrip("/")
        model, files = f"api/models/{MODEL}/", self.server.files
        file = path.removeprefix(f"{MODEL}/resolve/{COMMIT}/")
        status, content, headers = 200, b"", dict[str, str]()
        if path in (f"{model}revision/main", f"{model}revision/v1"):
            content = json.dumps({"id": MODEL, "sha": COMMIT}).encode()
        elif path == f"{model}tree/{COMMIT}":
            about = {"type": "file", "oid": "0"}
            tree = [{**about, "path": name, "size": len(files[name])} for name in files]
            content = json.dumps(tree).encode()
        elif file in files:
            content = whole = files[file]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hash(whole) % 10**9}"'}
            asked = self.headers.get("Range", "")
            if self.command == "GET":
                self.server.sent.append((file, asked))
            if asked:
                begin = int(asked.removeprefix("bytes=").partition("-")[0])
                status, content = 206, whole[begin:]
                headers["Content-Range"] = f"bytes {begin}-{len(whole) - 1}/{len(whole)}"
        elif path.startswith("api/models/gated/"):
            status, headers = 403, {"X-Error-Code": "GatedRepo"}
        else:
            missing = "Revision" if path.startswith(f"{model}revision/") else "Repo"
            status, headers = 404, {"X-Error-Code": f"{missing}NotFound"}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if file in self.server.cut:
            self.server.cut.remove(file)
            content = content[: len(content) // 2]
            self.close_connection = True
        self.wfile.write(content)

    def do_POST(self) -> None:
        """Creates a model, says how to upload files, and takes a commit."""
        content = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.posted.append((self.path, content))
        status, answer = 200, dict[str, Any]()
        if self.path == "/api/repos/create":
            name = json.loads(content)["name"]
            status = 409 if name in self.server.existing else 200
            answer = {"url": f"{self.server.url}/me/{name}", "error": "exists"}
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(content)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            answer = {"files": [{"path": path, **modes} for path in paths]}
        elif "/commit/" in self.path:
            answer = {"commitUrl": f"{self.server.url}/me/x/commit/{COMMIT}", "commitOid": COMMIT}
        written = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def exported(dataset: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    return attnlm.export(random_run("qwen3:embed_dim=64", dataset, path), path / "out").path


@pytest.fixture
def hub(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with Hub() as server:
        server.files = {path.name: path.read_bytes() for path in exported.iterdir()}
        server.files |= {"pytorch_model.bin": b"pickled", "onnx/model.onnx": b"large"}
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**12)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_downloads_resume_and_the_cache_works_offline(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.cut = {"model.safetensors"}
    events: list[Any] = []
    options: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoints"}
    run = attnlm.import_run(MODEL, revision="v1", on_event=events.append, **options)
    told = [event for event in events if event.task == "download"]
    assert told[-1].unit == "B" and told[-1].done == told[-1].total > 10_000
    needed = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {file for file, _ in hub.sent} == needed
    ranges = [asked for file, asked in hub.sent if file == "model.safetensors"]
    begin = int(ranges[1].removeprefix("bytes=").removesuffix("-"))
    assert len(ranges) == 2 and 0 < begin <= len(hub.files["model.safetensors"]) // 2
    assert run.imported_from == f"{MODEL}@{COMMIT}" and run.dataset.name == "Tiny-1.0"
    assert "".join(attnlm.sample(run, tokens=3, seed=1))

    sent = len(hub.sent)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = command("import", MODEL, "--revision", "v1", "--name", "theirs", cwd=tmp_path)
    assert done.stdout == "checkpoints/theirs\n" and "Error" not in done.stderr
    again = attnlm.open_run(tmp_path / "checkpoints" / "theirs")
    assert again.imported_from == run.imported_from and len(hub.sent) == sent
    with pytest.raises(AttnlmError, match="folder someone/other not found, and ") as refused:
        attnlm.import_run("someone/other", **options)
    assert "the network" in str(refused.value.hint)


def test_missing_hub_models_fail_with_one_error(hub: Hub, tmp_path: Path) -> None:
    for name, revision, says, hints in (
        ("gated/model", None, "is gated", "hf auth login"),
        ("nobody/nothing", None, "model nobody/nothing not found", "OWNER/NAME"),
        (MODEL, "v2", "`revision` v2 of", "`revision`"),
        *(
            (name, None, "is not a folder, a safetensors file or", "such as")
            for name in ("../secret", "a/b/c", "a/..", "a b", "lost.safetensors")
        ),
    ):
        with pytest.raises(AttnlmError) as refused:
            attnlm.import_run(name, revision=revision, checkpoint_dir=tmp_path / "checkpoints")
        assert says in refused.value.message and "\n" not in refused.value.message
        assert hints in refused.value.hint


def test_unsupported_models_are_refused_before_weights_are_downloaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoints"}
    with monkeypatch.context() as little:
        little.setattr(importing, "machine_memory", lambda: 1000)
        with pytest.raises(AttnlmError, match="of memory, but this machine has"):
            attnlm.import_run(MODEL, **options)
    shutil.rmtree(tmp_path / "cache")  # which keeps the files of a commit
    config = json.loads(hub.files["config.json"]) | {"model_type": "mamba"}
    hub.files["config.json"] = json.dumps(config).encode()
    with pytest.raises(AttnlmError, match="mamba"):
        attnlm.import_run(MODEL, revision="v1", **options)
    assert "model.safetensors" not in dict(hub.sent)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_without_a_file_is_refused(missing: str, hub: Hub, tmp_path: Path) -> None:
    del hub.files[missing]
    with pytest.raises(AttnlmError, match=missing.replace(".", r"\.")):
        attnlm.import_run(MODEL, checkpoint_dir=tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()


def test_local_folders_precede_the_hub_and_a_missing_extra_is_named(
    hub: Hub, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exported, "gpt2")
    assert attnlm.import_run("gpt2").imported_from == str(tmp_path / "gpt2")
    with pytest.raises(UsageError, match="`revision` applies only to models of the Hub"):
        attnlm.import_run("gpt2", revision="main")

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(AttnlmError, match="needs the Python package huggingface_hub") as refused:
        attnlm.import_run(MODEL)
    assert refused.value.hint == "install it: pip install huggingface_hub"


@pytest.mark.parametrize("public", [False, True])
def test_an_export_to_the_hub_makes_one_new_model(
    public: bool, hub: Hub, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = exported.parent / "qwen3-001"
    how = ("export", run, "hf:me/x", *(["--public"] if public else []))
    assert command(*how, cwd=tmp_path).stdout == "hf:me/x\n"
    created = json.loads(hub.posted[0][1])
    assert created["name"] == "x" and created["organization"] == "me"
    assert created["visibility"] == ("public" if public else "private")
    (commit,) = (content for path, content in hub.posted if path == "/api/models/me/x/commit/main")
    lines = [json.loads(line) for line in commit.splitlines()]
    files = {line["value"]["path"]: line["value"] for line in lines if line["key"] == "file"}
    assert files.keys() == {path.name for path in exported.iterdir()}
    assert base64.b64decode(files["config.json"]["content"]) == hub.files["config.json"]
    assert {line["key"] for line in lines} == {"header", "file"}  # nothing is deleted
    assert not list(tmp_path.glob(".*"))

    hub.existing, hub.posted = {"x"}, []
    fails(*how, cwd=tmp_path, code=1, says="me/x exists on the Hub", hints="another name")
    assert len(hub.posted) == 1
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    fails(*how, cwd=tmp_path, code=1, says="nobody is logged in", hints="hf auth login")


@pytest.mark.parametrize("version", [None, "5.2.9"])
def test_what_to_install_is_said_in_one_line(
    version: str | None, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = None if version is None else SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "transformers", old)
    says = "needs the Python package transformers" if version is None else "5.2.9 is too old"
    run = exported.parent / "qwen3-001"
    for words in (("import", exported), ("import", "hf:me/x"), ("export", run, "out")):
        fails(*words, cwd=tmp_path, code=1, says=says, hints="pip install")
    assert not list(tmp_path.iterdir())
