"""Folders with the layout of the Hub: `offline` reads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnlm
from attnlm.base.errors import AttnlmError

HEADERS = {
    "a path": "configs:\n- config_name: default\n  data_files:\n  - {split: train, path: URL}\n",
    "a list": "license: mit\nconfigs:\n- config_name: a\n  data_files: [a.jsonl, URL]\n",
    "one file": "configs:\n- {config_name: a, data_files: URL}\n",
}


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x.jsonl", "zip://a::https://b.example/c.zip"])
def test_offline_reads_no_url_that_a_folder_names(
    url: str, file: str, header: str, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    content = HEADERS[header].replace("URL", url)
    (tmp_path / file).write_text(f"---\n{content}---\n# A text\n" if ".md" in file else content)
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 50)
    with pytest.raises(AttnlmError, match="needs the network, but `offline` is set"):
        attnlm.prepare(f"hf:{tmp_path}", offline=True, data_dir=tmp_path / "data")


@pytest.mark.parametrize(
    "header", ["", "---\nhomepage: https://a.example\n---\n", "---\n: [\n---\n"]
)
def test_offline_reads_the_files_of_a_folder(header: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "README.md").write_text(header)
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 50)
    try:
        dataset = attnlm.prepare(f"hf:{tmp_path}", offline=True, data_dir=tmp_path / "data")
    except AttnlmError as error:  # the library reads the broken header, too
        assert ": [" in header and "cannot read" in error.message
    else:
        assert len(dataset.train) > 400
