"""Conversions: the same ids, logits and text in transformers, llama.cpp and here; bit for bit back; whole or absent."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import cordillera
from cordillera.data.tokenizers.chat import ChatFormat, ChatML, JinjaChat, Llama3Chat, Message, PlainChat
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.templates import template_of
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import CheckpointError, CordilleraError, DataError
from cordillera.models.language.checkpoints import load, save_consolidated, save_gguf, save_hugging_face
from cordillera.models.language.checkpoints.source import halves_to_interleaved
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.rope import RopeScaling
from cordillera.workflows import convert
from tests.data import vocabularies as v
from tests.models.language.sharded_folders import write_step
from tests.models.language.test_smollm2 import PATH as SMOLLM2

GGUF = "model.gguf"
CHATS = (
    [Message("user", "the cat sat")],
    [
        Message("system", "the end"),
        Message("user", "é 漢字\n12"),
        Message("assistant", "mat"),
        Message("user", "  on?"),
    ],
)


def model_for(tokenizer: Tokenizer, seed: int = 0, **more: Any) -> Llama:
    """A small model whose greedy text varies, with three rows more than tokens."""
    shapes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "context": 96}
    model = Llama(LlamaConfig(**{**shapes, "vocabulary": tokenizer.vocab_size + 3, **more}))
    model.init_weights(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
            else:
                parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)))
        for layer in (model.embedding, model.head or model.embedding):
            layer.weight[tokenizer.vocab_size :] = 0  # rows that are no token are not the likeliest
    return model


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with each kind of tokenizer, as they are published or trained here."""
    root = tmp_path_factory.mktemp("sources")
    (root / "vocabulary").mkdir()
    published, llama3 = v.write_json(root / "vocabulary"), v.write_tiktoken(root)
    scaling = RopeScaling(factor=5.0, original_context=40)
    save_hugging_face(model_for(load_tokenizer(published)), root / "json", tokenizer=load_tokenizer(published))
    tied = model_for(load_tokenizer(llama3), tied=True, rope_scaling=scaling, vocabulary=1000).bfloat16()
    save_consolidated(tied, root / "tiktoken", 2, tokenizer=load_tokenizer(llama3))
    gguf = load_tokenizer(v.write_gguf(root))
    save_gguf(model_for(gguf, tied=True), root / "gguf.gguf", tokenizer=gguf)
    return {"json": root / "json", "tiktoken": root / "tiktoken", "gguf": root / "gguf.gguf"}


def texts(count: int) -> list[str]:
    """Texts of all kinds of characters."""
    draw = random.Random(0)
    ranges = ((0, 0x7F), (0, 0x7F), (0x80, 0xD7FF), (0xE000, 0x10FFFF))
    found = ["the cat sat on the mat 1234", " \n\n x\t\ty  ", "don't DON'T", "漢字 ééé\U0001f600"]
    for _ in range(count):
        low, high = draw.choice(ranges)
        found.append("".join(chr(draw.choice([32, 10, 0x74, draw.randint(low, high)])) for _ in range(12)))
    return found


def parameters(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in load(path, dtype)[1].named_parameters()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.cases(2)
@pytest.mark.peer
@pytest.mark.parametrize("kind", ["json", "tiktoken", "gguf"])
@pytest.mark.parametrize("way", ["", "gguf", "meta"])
def test_a_converted_folder_has_the_ids_logits_and_text_of_transformers(
    sources: dict[str, Path], tmp_path: Path, kind: str, way: str
) -> None:
    """Directly, and by way of the other layouts."""
    transformers = pytest.importorskip("transformers")
    source = sources[kind]
    if way:
        source = tmp_path / (GGUF if way == "gguf" else way)
        convert(sources[kind], source, way, dtype="float32")
    done = convert(source, tmp_path / "hf")
    assert (done.error, done.same_chats) == (0.0, True)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), load_tokenizer(tmp_path / "hf")
    before = load_tokenizer(sources[kind])
    for text in texts(100):
        assert ours.encode(text) == before.encode(text)
        assert theirs(text)["input_ids"] == ours.encode(text, bos=ours.adds_bos), text
    for chat in CHATS:
        ids = ours.encode_chat(chat)
        assert ids == before.encode_chat(chat)
        turns = [{"role": turn.role, "content": turn.content} for turn in chat]
        assert theirs.apply_chat_template(turns, add_generation_prompt=True)["input_ids"] == ids
    assert set(ours.stop_ids) == set(before.stop_ids)

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    tokens = torch.tensor(ids)
    with torch.no_grad():
        found = load(sources[kind], torch.float64)[1](tokens, torch.tensor([0, len(tokens)]))
        expected = model(tokens[None]).logits[0]
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * expected.abs().max().item())

    assert set(np.atleast_1d(model.generation_config.eos_token_id)) == set(before.stop_ids)
    pipeline = transformers.pipeline("text-generation", model=model.float(), tokenizer=theirs)
    with torch.no_grad():
        answer = pipeline(turns[-1:], max_new_tokens=12, do_sample=False)[0]["generated_text"][-1]["content"]
    here = cordillera.load_language_model(tmp_path / "hf", dtype="float32")
    (text,) = here.generate(chat[-1].content, max_new_tokens=12, sampling=cordillera.Sampling(temperature=0))
    assert text.text == answer


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"tied": True, "rope_scaling": RopeScaling(factor=32.0), "context": 131072}, {"head_dim": 8, "kv_heads": 4}],
    ids=["plain", "tied", "narrow heads"],
)
def test_every_bit_comes_back_from_gguf_and_meta(tmp_path: Path, shape: dict[str, Any], dtype: str) -> None:
    (tmp_path / "v").mkdir()
    tokenizer = load_tokenizer(v.write_json(tmp_path / "v"))
    save_hugging_face(model_for(tokenizer, **shape).to(getattr(torch, dtype)), tmp_path / "hf", tokenizer=tokenizer)
    others = [tmp_path / GGUF] + ([] if "head_dim" in shape else [tmp_path / "meta"])
    for other in others:
        layout = "gguf" if other.suffix else "meta"
        assert convert(tmp_path / "hf", other, layout).error == 0
        assert load(other)[0] == load(tmp_path / "hf")[0]
        back = tmp_path / f"back from {layout}"
        assert convert(other, back).weights == dtype
        assert (back / "model.safetensors").read_bytes() == (tmp_path / "hf" / "model.safetensors").read_bytes()
        first, second = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "hf", back))
        assert set(first.pop("eos_token_id")) == set(second.pop("eos_token_id"))
        assert first == second


def test_llama3s_own_file_comes_back_from_the_other_layouts(sources: dict[str, Path], tmp_path: Path) -> None:
    convert(sources["tiktoken"], tmp_path / "hf")
    for source in (tmp_path / "hf", tmp_path / GGUF):
        if source.suffix:
            convert(tmp_path / "hf", source)
        convert(source, tmp_path / "meta", "meta", ranks=2, overwrite=True)
        for name in ("tokenizer.model", "params.json", "consolidated.01.pth"):
            assert (tmp_path / "meta" / name).read_bytes() == (sources["tiktoken"] / name).read_bytes(), name


def test_other_vocabularies_stay_beside_metas_weights(sources: dict[str, Path], tmp_path: Path) -> None:
    """One more merge, or a special token of another name, and tokenizer.model would be another tokenizer."""
    convert(sources["tiktoken"], tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"].pop()
    path.write_text(json.dumps(content))
    convert(tmp_path / "hf", tmp_path / "meta", "meta")
    assert json.loads((tmp_path / "meta" / "tokenizer.json").read_text()) == content
    assert not (tmp_path / "meta" / "tokenizer.model").exists()


def test_progress_of_several_ranks_ends_with_the_last(sources: dict[str, Path], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(sources["tiktoken"], tmp_path / "meta", "meta", ranks=2, on_tensor=lambda *done: seen.append(done))
    assert [place for place, (done, total) in enumerate(seen, 1) if done == total] == [len(seen)]


@pytest.mark.parametrize("quantize", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_codes_are_those_of_the_reference(sources: dict[str, Path], tmp_path: Path, quantize: str) -> None:
    gguf = pytest.importorskip("gguf")
    done = convert(sources["json"], tmp_path / GGUF, quantize=quantize)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / GGUF).tensors}
    weights = load_file(sources["json"] / "model.safetensors")
    query = halves_to_interleaved(weights["model.layers.1.self_attn.q_proj.weight"].unflatten(0, (4, 16))).flatten(0, 1)
    squares = errors = 0.0
    for theirs, weight, kind in (
        ("blk.1.attn_q", query, quantize),
        ("blk.0.ffn_down", weights["model.layers.0.mlp.down_proj.weight"], quantize),
        ("token_embd", weights["model.embed_tokens.weight"], "q8_0"),
        ("output", weights["lm_head.weight"], "q8_0"),
    ):
        tensor, type_ = stored[f"{theirs}.weight"], gguf.GGMLQuantizationType[kind.upper()]
        assert tensor.tensor_type == type_
        np.testing.assert_array_equal(tensor.data, gguf.quantize(weight.numpy(), type_))
    assert stored["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    read, exact = parameters(tmp_path / GGUF), parameters(sources["json"])
    for name, weight in exact.items():
        errors += (read[name] - weight).double().square().sum().item() if weight.dim() == 2 else 0
        squares += weight.double().square().sum().item() if weight.dim() == 2 else 0
    assert done.error == pytest.approx((errors / squares) ** 0.5, rel=1e-6)
    assert done.error < {"q4": 0.1, "q5": 0.05, "q8": 0.01}[quantize[:2]]
    if quantize == "q8_0":  # its codes are those of the values that they stand for
        again = convert(tmp_path / GGUF, tmp_path / "again" / GGUF, quantize=quantize)
        assert again.error == 0
        size = sum(tensor.n_bytes for tensor in stored.values())
        assert (tmp_path / "again" / GGUF).read_bytes()[-size:] == (tmp_path / GGUF).read_bytes()[-size:]


def test_codes_become_the_float32_that_they_stand_for(sources: dict[str, Path], tmp_path: Path) -> None:
    convert(sources["json"], tmp_path / GGUF, quantize="q4_0")
    done = convert(tmp_path / GGUF, tmp_path / "hf")
    assert (done.source, done.weights, done.error) == ("GGUF, Q4_0 and Q8_0", "float32", 0.0)
    assert same(parameters(tmp_path / "hf"), parameters(tmp_path / GGUF))


def test_casting_says_what_it_changes(sources: dict[str, Path], tmp_path: Path) -> None:
    done = convert(sources["json"], tmp_path / "half", dtype="bfloat16")
    exact, cast = parameters(sources["json"]), parameters(tmp_path / "half")
    errors = sum((cast[name] - exact[name]).double().square().sum().item() for name in exact)
    squares = sum(exact[name].double().square().sum().item() for name in exact)
    assert done.error == pytest.approx((errors / squares) ** 0.5, rel=1e-6)
    assert 1e-4 < done.error < 2**-8


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["json", "tiktoken"])
def test_llama_cpp_reads_what_is_written(sources: dict[str, Path], tmp_path: Path, kind: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    convert(sources[kind], tmp_path / GGUF, dtype="float32")
    model = llama_cpp.Llama(str(tmp_path / GGUF), n_ctx=96, verbose=False, logits_all=True, n_threads=1)
    tokenizer = load_tokenizer(sources[kind])
    for text in texts(30):
        if "\0" not in text and text.strip():
            assert model.tokenize(text.encode(), add_bos=False, special=False) == tokenizer.encode(text), text
    tokens = tokenizer.encode_chat(CHATS[0])
    model.eval(tokens)
    found = load(sources[kind])[1](torch.tensor(tokens), torch.tensor([0, len(tokens)])).detach()
    expected = torch.from_numpy(np.array(model.scores[: len(tokens)]))
    torch.testing.assert_close(expected, found, rtol=0, atol=2e-2 * found.abs().max().item())  # its keys are float16
    assert model.token_eos() == tokenizer.eos_id


def test_a_run_of_chats_is_converted_with_its_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained here on bytes, whose vocabulary has no tokens for chats."""
    monkeypatch.chdir(tmp_path)
    changes = {"training.steps": 2, "data.held_out": 0.001}
    cordillera.train(cordillera.load_recipe("arithmetic-sft", changes), "run")
    done = convert("run", "hf")
    assert (done.chats, done.same_chats, done.stops) == (True, True, ("<|end_of_text|>",))
    ours, before = (cordillera.load_language_model(name, dtype="float32", drafter="none") for name in ("hf", "run"))
    for chat in CHATS:
        assert ours.tokenizer.encode_chat(chat) == before.tokenizer.encode_chat(chat)
    greedy = cordillera.Sampling(temperature=0)
    assert ours.generate("2 + 3", max_new_tokens=8, sampling=greedy) == before.generate(
        "2 + 3", max_new_tokens=8, sampling=greedy
    )


@settings(max_examples=50)
@given(data=st.data())
def test_templates_write_what_their_formats_do(data: st.DataObject) -> None:
    formats: list[ChatFormat] = [
        Llama3Chat(),
        ChatML(),
        ChatML('be "brief"\n'),
        PlainChat(None, "<e>"),
        PlainChat("<b>", "<e>"),
    ]
    chosen = data.draw(st.sampled_from(formats))
    roles = st.sampled_from(("system", "user", "assistant", "tool"))
    turns = data.draw(st.lists(st.builds(Message, roles, st.text(max_size=8)), max_size=4))
    answer = data.draw(st.booleans())
    names = [
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    template = JinjaChat(template_of(chosen), [*names, "<b>", "<e>"], bos=None, eos=None, where="test")

    def written(chat_format: ChatFormat) -> str:
        parts = chat_format.pieces(turns, answer=answer)
        return "".join(part if isinstance(part, str) else f"\0{part.name}\0" for part in parts)

    assert written(template) == written(chosen)


# What can go wrong


def test_a_conversion_is_whole_or_not_there(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, total: int) -> None:
        assert total == sum(one.numel() for one in parameters(sources["json"]).values())
        if done > total / 2:
            raise KeyboardInterrupt

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for target, layout in ((tmp_path / "hf", None), (tmp_path / "meta", "meta"), (tmp_path / GGUF, None)):
        with pytest.raises(KeyboardInterrupt):
            convert(sources["json"], target, layout, on_tensor=stop)
        with monkeypatch.context() as patch:
            patch.setattr("cordillera.data.files.sync", full)
            with pytest.raises(CheckpointError, match="the disk is full"):
                convert(sources["json"], target, layout)
        with monkeypatch.context() as patch:
            usage = type("Usage", (), {"free": 1000})
            patch.setattr("shutil.disk_usage", lambda _, usage=usage: usage)
            with pytest.raises(CheckpointError, match=r"takes 0\.00 GB, the disk has 0\.00 GB left"):
                convert(sources["json"], target, layout)
        assert os.listdir(tmp_path) == []


def test_only_a_checkpoint_is_replaced_and_only_when_asked(sources: dict[str, Path], tmp_path: Path) -> None:
    target, file = tmp_path / "hf", tmp_path / GGUF
    convert(sources["json"], target)
    convert(sources["json"], file)
    before = (target / "model.safetensors").read_bytes(), file.read_bytes()
    with pytest.raises(CheckpointError, match="is not empty"):
        convert(sources["gguf"], target)
    with pytest.raises(CheckpointError, match="exists already"):
        convert(sources["gguf"], file, dtype="float16")
    with pytest.raises(CheckpointError):  # fails while it is written, and the old one stays
        convert(_overflowing(tmp_path), target, dtype="float16", tokenizer="bytes", overwrite=True)
    assert ((target / "model.safetensors").read_bytes(), file.read_bytes()) == before
    convert(sources["gguf"], target, overwrite=True)
    convert(sources["gguf"], file, dtype="float16", overwrite=True)
    assert same(parameters(target), parameters(sources["gguf"]))
    assert same(parameters(file, torch.float16), parameters(sources["gguf"], torch.float16))
    convert(target, target, dtype="float16", overwrite=True)  # onto itself
    assert same(parameters(target, torch.float16), parameters(file, torch.float16))
    (target / "runs").mkdir()
    with pytest.raises(CheckpointError, match="holds more than a checkpoint"):
        convert(sources["json"], target, overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds more than a checkpoint"):
        convert(sources["json"], tmp_path / "other", overwrite=True)
    (target / "runs").rmdir()
    for name in ("data.csv", "model.py"):  # beside the files of the checkpoint
        (target / name).write_text("mine")
        with pytest.raises(CheckpointError, match="holds more than a checkpoint"):
            convert(sources["json"], target, overwrite=True)
        (target / name).unlink()
    (tmp_path / "other" / "config.json").write_text("{}")  # that of another program
    with pytest.raises(CheckpointError, match="holds more than a checkpoint"):
        convert(sources["json"], tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == sorted(["hf", GGUF, "other", "large"])


def _overflowing(folder: Path) -> Path:
    """A model with a weight that float16 does not hold."""
    model = model_for(load_tokenizer("bytes"))
    with torch.no_grad():
        model.layers[1].feed_forward.down.weight[3, 5] = 70_000
    save_hugging_face(model, folder / "large")
    return folder / "large"


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    large = _overflowing(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.feed_forward\.down\.weight holds NaN or infinity as float16"
    ):
        convert(large, tmp_path / "half", dtype="float16", tokenizer="bytes")
    tensors = load_file(large / "model.safetensors")
    tensors["model.norm.weight"][2] = float("nan")
    (large / "checksums.json").unlink()
    save_file(tensors, large / "model.safetensors")
    for target in ("hf", GGUF):
        with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN or infinity as float32"):
            convert(large, tmp_path / target, tokenizer="none")
    assert os.listdir(tmp_path) == ["large"]


def test_a_damaged_source_leaves_no_target(sources: dict[str, Path], tmp_path: Path) -> None:
    step = write_step(tmp_path / "step-000000003", model_for(load_tokenizer("bytes")))
    content = (step / "weights-00001.safetensors").read_bytes()
    (step / "weights-00001.safetensors").write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(CheckpointError, match="is corrupt"):
        convert(step, tmp_path / "hf", tokenizer="bytes")
    whole = sources["gguf"].read_bytes()
    (tmp_path / GGUF).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="is truncated"):
        convert(tmp_path / GGUF, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


REFUSED: dict[str, tuple[dict[str, Any], type[CordilleraError], str]] = {
    "layout": ({"to": "onnx"}, DataError, "unknown layout 'onnx'"),
    "file for a folder": ({"target": GGUF, "to": "meta"}, DataError, "is no name for meta"),
    "folder for a file": ({"to": "gguf"}, DataError, "end its name in .gguf"),
    "dtype": ({"dtype": "int4"}, DataError, "unknown dtype 'int4'"),
    "codes": ({"target": GGUF, "quantize": "q6_k"}, DataError, "'q6_k' cannot be written"),
    "codes elsewhere": ({"quantize": "q8_0"}, DataError, "is for GGUF alone"),
    "codes and dtype": ({"target": GGUF, "quantize": "q8_0", "dtype": "float16"}, DataError, "leave one of them out"),
    "ranks elsewhere": ({"ranks": 2}, DataError, "is for Meta's layout alone"),
    "ranks": ({"to": "meta", "ranks": 7}, CheckpointError, "7 ranks do not divide heads"),
    "source": ({"source": "nothing"}, DataError, "is no file, no folder and no model's name"),
    "tokenizer": ({"tokenizer": "nothing"}, DataError, "there is no such file or folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_named_before_anything_is_written(sources: dict[str, Path], tmp_path: Path, case: str) -> None:
    given, kind, words = REFUSED[case]
    arguments = {"source": sources["json"], **given, "target": tmp_path / given.get("target", "out")}
    with pytest.raises(kind, match=words):
        convert(**arguments)
    assert os.listdir(tmp_path) == []


def test_what_a_layout_cannot_hold_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the folder holds no tokenizer") as error:
        convert(_overflowing(tmp_path), tmp_path / "hf")
    assert "none for weights alone" in str(error.value)
    assert convert(tmp_path / "large", tmp_path / "hf", tokenizer="none").tokens is None
    with pytest.raises(DataError, match="is GGUF, F32 already"):
        convert(sources["gguf"], tmp_path / GGUF)

    copied = tmp_path / "copied"
    convert(sources["json"], copied)
    path = copied / "tokenizer.json"
    content = json.loads(path.read_text())
    rules = [{"type": "Digits", "individual_digits": False}, content["pre_tokenizer"]["pretokenizers"][1]]
    for change, words in (
        ({"normalizer": {"type": "NFKC"}}, "normalises texts"),
        ({"pre_tokenizer": {**content["pre_tokenizer"], "pretokenizers": rules}}, "has no name in GGUF"),
        ({"added_tokens": [{**token, "lstrip": True} for token in content["added_tokens"]]}, "takes the space around"),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(DataError, match=words):
            convert(copied, tmp_path / GGUF)
    assert not (tmp_path / GGUF).exists()


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="the weights are not here (cordillera data get smollm2)")
def test_smollm2_chats_in_transformers_as_it_does_here(tmp_path: Path) -> None:
    """From four-bit codes to float32: no weight changes, and neither do ids, logits and text."""
    transformers = pytest.importorskip("transformers")
    assert convert(SMOLLM2, tmp_path / "hf").error == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = cordillera.load_language_model(SMOLLM2, dtype="float32", drafter="none")
    for text in texts(300):
        assert tokenizer(text)["input_ids"] == ours.tokenizer.encode(text), text
    question = "What is a mountain range?"
    (ids,) = ours.encode([question])
    turn = [{"role": "user", "content": question}]
    assert tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"] == ids
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
        found = ours.model(torch.tensor(ids), torch.tensor([0, len(ids)]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    answer = pipeline(turn, max_new_tokens=40, do_sample=False)[0]["generated_text"][-1]["content"]
    (text,) = ours.generate(question, max_new_tokens=40, sampling=cordillera.Sampling(temperature=0))
    assert text.text == answer
