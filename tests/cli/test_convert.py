"""``cordillera convert``: what it says, and that what it writes is spoken with."""

from __future__ import annotations

import json

from tests.serving.small_models import write_model


def test_the_command_says_what_it_did(cli, tmp_path):
    write_model(tmp_path / "small")
    done = cli("convert", "small", "small.gguf", "--quantize", "q4_1")
    assert done.code == 0, done.err
    assert "small (Hugging Face, float32) -> small.gguf (GGUF, q4_1)" in " ".join(done.out.split())
    assert "relative error of weights 0.0" in done.out
    assert "chat template, ends at <|im_end|>" in done.out
    assert cli("generate", "small.gguf", "the cat", "-n", 2).code == 0
    failed = cli("convert", "small", "other.gguf", "--quantize", "q3_k")
    assert failed.code == 2
    assert "--quantize: 'q3_k' cannot be written" in failed.err
    assert not (tmp_path / "other.gguf").exists()
    document = json.loads(cli("convert", "small.gguf", "hf", "--json", "-q").out)
    assert (document["layout"], document["error"], document["chats"]) == ("hugging-face", 0.0, True)
    for target in ("hf", "small.gguf"):
        there = cli("convert", "small", target, "-q")
        assert there.code == 2
        assert "or delete this one; --overwrite replaces a whole checkpoint" in " ".join(there.err.split())
    silent = cli("convert", "small", "hf", "--overwrite", "-q")
    assert (silent.code, silent.out, silent.err) == (0, "", "")
