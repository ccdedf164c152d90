"""An input file with a key of a grammar is recognised, wherever the key is."""

from __future__ import annotations

import pytest

from sarathi_pp.inputs import scan
from sarathi_pp.inputs.scan import names_grammars


@pytest.mark.parametrize("block", [32, 1 << 20])
@pytest.mark.parametrize("offset", [0, 5, 17, 30])
def test_a_key_is_found_also_across_two_blocks(block, offset, tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "_BLOCK", block)
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"prompt": "{"x" * offset}"}}\n{{"prompt": "y", "structured_outputs": {{"regex": "a"}}}}\n')
    assert names_grammars(str(path))
    path.write_text(path.read_text().replace("structured_outputs", "structured_output"))
    assert names_grammars(str(path)) is False


def test_a_stream_is_not_read():
    assert names_grammars("-") is None
