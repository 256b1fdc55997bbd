"""``cordillera evaluate MODEL --file FILE`` of language models."""

from __future__ import annotations

import json
import re

from tests.serving.small_models import write_model


def test_any_language_model_is_evaluated_on_text_and_questions(cli, tmp_path):
    write_model(tmp_path / "small")
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 40)
    done = cli("evaluate", "small", "--file", "a.txt")
    assert done.code == 0, done.err
    assert "a.txt: 1 text" in done.out
    found = json.loads(cli("evaluate", "small", "--file", "a.txt", "--json").out)
    low, high = found["loss_interval"]
    assert low < found["loss"] < high
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert f"{found[name]:.4f}" in done.out
    (tmp_path / "q.jsonl").write_text(json.dumps({"prompt": "the", "choices": ["cat", "mat"], "answer": 0}) + "\n")
    assert "q.jsonl: 1 question" in cli("evaluate", "small", "--file", "q.jsonl").out
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "the cat?", "completion": "sat"}) + "\n")
    assert re.search(r"c\.jsonl: 1 chat, \d+ tokens of answers", cli("evaluate", "small", "--file", "c.jsonl").out)
    refused = cli("evaluate", "small", "--dtype", "int4")
    assert refused.code == 2
    assert "is for a language model and a file" in refused.err
