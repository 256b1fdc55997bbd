"""Names from outside go through every page and every line of the terminal as text: nothing in them is obeyed."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tomlkit

from tests.attacks import made
from tests.attacks.commands import Commands, Outcome
from tests.cli.conftest import RECIPE, write_log
from tests.cli.test_language_commands import RECIPE as LANGUAGE
from tests.cli.test_language_commands import write_text
from tests.fuzzing import CONTROLS

pytestmark = pytest.mark.slow

EVIL = "x-evil"
HTML = f"</title></style></script><{EVIL} onload='a'>\"'>{EVIL}<!-- {{{{7*7}}}} {{% x %}}"
TERMINAL = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2066"
NAMES = {
    "html": HTML,
    "an attribute": f'" onmouseover="{EVIL}" x="',
    "terminal": f"a{TERMINAL}b",
    "line breaks": "a\nerror: b\rc\u2028d",
    "markup": "[/bold][red]x[/red]:smile:",
    "formats": "{0} {x} %s %(x)s $x `id` $(id)",
}
STEERS = frozenset(chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))) | CONTROLS


class _Elements(HTMLParser):
    """Elements of a page that a name has made: of a name of ours, or with an attribute of ours."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at an element."""
        if tag == EVIL or any(name.startswith("on") for name, _ in attrs):
            self.found.append(f"<{tag} {attrs}>")
        for name, value in attrs:
            if name in ("href", "src") and value and value.strip().lower().startswith(("javascript:", "data:text")):
                self.found.append(f"<{tag} {name}={value}>")

    def handle_comment(self, data: str) -> None:
        """Look at a comment."""
        if EVIL in data or "7*7" in data:
            self.found.append(f"<!--{data}-->")


def obeyed(folder: Path) -> list[str]:
    """What names have made of the pages in a folder."""
    found = []
    for page in folder.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        elements = _Elements()
        elements.feed(text)
        found += [f"{page}: {one}" for one in elements.found]
        found += [f"{page}: a template filled in 49"] * ("{{7*7}}" not in text and ">49 " in text)
        found += [f"{page}: holds {sorted(steering)!r}" for steering in [STEERS & set(text)] if steering]
    return found


def plain(outcome: Outcome) -> None:
    """The command has worked, or refused a name in words; its output does not steer the terminal.

    The text of a model goes into pipes as it is; tests of `generate` show that a terminal gets it without controls.
    """
    if outcome.arguments[0] == "generate" and "--json" not in outcome.arguments:
        outcome = dataclasses.replace(outcome, out="")
    assert not outcome.defects(), outcome.text
    assert outcome.code in (0, 1) or "error" in outcome.err.lower(), outcome.text
    assert not STEERS & set(outcome.out + outcome.err), outcome.text
    assert not [line for line in outcome.err.splitlines() if line.startswith("error: b")], outcome.text


@pytest.mark.parametrize("kind", NAMES)
def test_names_of_a_ranking_run(commands: Commands, tmp_path: Path, kind: str) -> None:
    name = NAMES[kind]
    label, feature, segment, group = (f"{part}{name}" for part in ("click", "price", "device", "user"))
    log = write_log(tmp_path / "log.csv", rows=600)
    lines = log.read_text().split("\n")[1:-1]
    import polars as pl

    rows = [line.split(",") for line in lines]
    columns = ("id", "time", group, segment, feature, f"seen{name}", label)
    frame = pl.DataFrame({column: [row[n] for row in rows] for n, column in enumerate(columns)})
    frame = frame.with_columns(
        pl.col("time").cast(pl.Int64), pl.col(label).cast(pl.Int64), pl.col(feature).cast(pl.Float64, strict=False),
        pl.col(segment).replace("phone", f"phone{name}"),
    )  # fmt: skip
    frame.write_parquet(tmp_path / "log.parquet")
    content = tomlkit.parse(RECIPE.format(path="log.parquet").replace("epochs = 6", 'epochs = 1\nprecision = "fp32"'))
    schema = content["data"]["schema"]  # type: ignore[index]
    schema["dense"] = [{"name": feature}]  # type: ignore[index]
    schema["categorical"] = [{"name": group}, {"name": segment}]  # type: ignore[index]
    schema["lists"] = [{"name": f"seen{name}"}]  # type: ignore[index]
    for key, value in {"labels": [label], "group": group, "segments": [segment]}.items():
        schema[key] = value  # type: ignore[index]
    content["description"] = f"of {name}"
    (tmp_path / "small.toml").write_text(tomlkit.dumps(content))
    run = "run" + name.replace("/", "").replace("\0", "")[:80]
    for arguments in (
        ["train", "small.toml", "--run", run],
        ["evaluate", run, "--importance"],
        ["evaluate", run, "--json"],
        ["quantize", run, "--budget", "50"],
        ["probe", run],
        ["inject", run, "-n", "32", "--samples", "32"],
        ["towers", run, "--towers", "2"],
        ["watch", run, "log.parquet"],
        ["predict", run, "log.parquet", "--out", "scores.csv"],
        ["export", run],
        ["report", run],
        ["compare", run, "--out", "compare.html"],
        ["compare", run, "--markdown"],
        ["recipe", "show", run],
        ["recipe", "new", "log.parquet", "--label", label, "--out", "new.toml"],
        ["train", run, "--resume"],
        ["train", name],
        ["evaluate", run, "--split", name],
        ["train", "small.toml", "--set", f"model.{name}=1"],
    ):
        outcome = commands(*arguments, folder=tmp_path)
        plain(outcome)
        if arguments[0] in ("report", "quantize", "inject", "towers", "export"):
            assert outcome.code == 0, outcome.text
    assert len(list(tmp_path.rglob("*.html"))) >= 5
    assert not obeyed(tmp_path)


@pytest.mark.parametrize("kind", NAMES)
def test_names_of_a_language_run(commands: Commands, tmp_path: Path, kind: str) -> None:
    name = NAMES[kind]
    write_text(tmp_path / "text.jsonl")
    content = tomlkit.parse(LANGUAGE.replace("steps = 12", "steps = 4"))
    content["description"] = f"of {name}"
    (tmp_path / "small.toml").write_text(tomlkit.dumps(content))
    run = "run" + name.replace("/", "")[:80]
    for arguments in (
        ["train", "small.toml", "--run", run],
        ["evaluate", run],
        ["report", run],
        ["compare", run, "--out", "compare.html"],
        ["average", run, run, "--out", f"mean{run}"],
        ["generate", run, f"say {name}", "--max-new-tokens", "4"],
        ["generate", run, "say", "--choice", name, "--max-new-tokens", "4"],
        ["generate", run, "say", "--max-new-tokens", "4", "--json"],
    ):
        outcome = commands(*arguments, folder=tmp_path)
        plain(outcome)
    assert len(list(tmp_path.rglob("*.html"))) >= 2
    assert not obeyed(tmp_path)


@pytest.mark.parametrize("kind", NAMES)
def test_names_of_plans(commands: Commands, tmp_path: Path, kind: str) -> None:
    name = NAMES[kind]
    made.planned(commands, tmp_path)
    cluster, job = (tomlkit.parse((tmp_path / file).read_text()) for file in ("cluster.toml", "job.toml"))
    cluster["description"] = job["description"] = name
    cluster["device"]["name"] = name  # type: ignore[index]
    for level in cluster["levels"]:  # type: ignore[attr-defined]
        level["name"] = f"{level['name']}"
    (tmp_path / "cluster.toml").write_text(tomlkit.dumps(cluster))
    (tmp_path / "job.toml").write_text(tomlkit.dumps(job))
    out = "plans" + name.replace("/", "")[:80]
    for arguments in (
        ["plan", "job.toml", "cluster.toml", "--out", out],
        ["plan", "job.toml", "cluster.toml", "--out", out, "--json"],
        ["plan", "job.toml", "cluster.toml", "--set", f"{name}=1"],
        ["plan", "job.toml", "cluster.toml", "--what-if", f"{name}*=2"],
        ["simulate-faults", "--plan", f"{out}/plan.json", "--days", "1", "--runs", "2"],
    ):
        plain(commands(*arguments, folder=tmp_path))
    assert not obeyed(tmp_path)


@pytest.mark.parametrize("kind", NAMES)
def test_names_in_traces(commands: Commands, tmp_path: Path, kind: str) -> None:
    name = NAMES[kind]
    made.traced(commands, tmp_path)
    for path in (tmp_path / "json").iterdir():
        text = path.read_text().replace("all_reduce", json.dumps(name)[1:-1])
        content = json.loads(text)
        for config in content.get("pg_config", {}).values():
            config["desc"] = name
        path.write_text(json.dumps(content))
    for arguments in (["blame", "json"], ["blame", "json", "--json"], ["blame", "json", "--plot", "ranks.svg"]):
        outcome = commands(*arguments, folder=tmp_path)
        assert not outcome.defects(), outcome.text
        assert not STEERS & set(outcome.out + outcome.err), outcome.text
    for picture in tmp_path.glob("*.svg"):
        elements = _Elements()
        elements.feed(picture.read_text())
        assert not elements.found


@pytest.mark.parametrize("kind", NAMES)
def test_names_of_searches(commands: Commands, tmp_path: Path, kind: str) -> None:
    name = NAMES[kind]
    made.searched(commands, tmp_path)
    recipe = tomlkit.parse((tmp_path / "tiny.toml").read_text())
    recipe["description"] = name
    (tmp_path / "tiny.toml").write_text(tomlkit.dumps(recipe))
    run = "found" + name.replace("/", "")[:80]
    search = ["search", "tiny.toml", "--space", "space.toml", "--run", run, "--searcher", "random", "--trials", "2",
              "--sample", "1", "--workers", "1"]  # fmt: skip
    sizes = ["--size", "model.mlp=[4]", "--size", "model.mlp=[8]", "--size", "model.mlp=[16]"]
    sweep = ["sweep", "tiny.toml", *sizes, "--run", f"sweep{run}", "--set", "training.max_steps=2"]
    for arguments in (search, ["report", run], sweep):
        plain(commands(*arguments, folder=tmp_path))
    assert not obeyed(tmp_path)
