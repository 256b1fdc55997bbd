"""Ranking models that are replaced while a server answers: no request fails or meets two models, and failures."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import polars as pl
import pytest
import torch

import cordillera
from cordillera import workflows
from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import Schema
from cordillera.errors import RunError
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.serving.ranking.row_reader import RowReader
from cordillera.training import checkpoints
from cordillera.training.ranking.scoring import best_checkpoint
from cordillera.workflows.prediction import open_scorer
from cordillera.workflows.serving import opening, reloading
from cordillera.workflows.serving.opening import ServerConfig, step_of_weights
from cordillera.workflows.serving.reloading import open_reloadable_services
from tests.cli.conftest import RECIPE, write_log
from tests.serving.servers import SECONDS, eventually, listening

ROW = {"price": 12.5, "user": "u3", "device": "phone", "seen": ["1", "2"]}


def train(folder: Path, name: str, text: str = RECIPE, **keys: Any) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text.format(path=folder / "log.csv"))
    recipe = load(path, {"data.cache_dir": str(folder / "cache"), "training.epochs": 1} | keys)
    return workflows.train(recipe, folder / name).run.folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one recipe and two seeds, ``one`` and ``two``."""
    folder = tmp_path_factory.mktemp("runs")
    write_log(folder / "log.csv", rows=400)
    train(folder, "one")
    train(folder, "two", seed=7, **{"training.max_steps": 2})
    return folder


@pytest.fixture
def link(made: Path, tmp_path: Path) -> Callable[[str | Path], Path]:
    """Makes the link ``current`` lead to a run, at once."""

    def to(run: str | Path) -> Path:
        beside = tmp_path / "next"
        beside.symlink_to(made / run)
        os.replace(beside, tmp_path / "current")
        return tmp_path / "current"

    return to


class Reloaded:
    """A server of ``current`` in this process."""

    def __init__(self, services: Any, address: str, said: list[str]) -> None:
        self.services, self.said = services, said
        self.client = httpx.Client(base_url=address, timeout=SECONDS)

    def score(self, client: httpx.Client | None = None) -> tuple[float, str, int]:
        answer = (client or self.client).post("/v1/score", json={"rows": [ROW]})
        assert answer.status_code == 200, answer.text
        found = answer.json()["data"][0]["scores"]["click"]
        return found, answer.headers["cordillera-run"], int(answer.headers["cordillera-step"])

    def reload(self) -> str:
        """Ask for a reload, wait for its end, and return what was said."""
        before = len(self.said)
        self.services.reload()
        eventually(lambda: any(" answers " in line for line in self.said[before:]), "no reload ends")
        return self.said[-1]

    def facts(self) -> dict[str, Any]:
        [found] = self.client.get("/v1/models").json()["data"]
        return found

    def metric(self, name: str, **labels: str) -> float | None:
        return self.services.registry.get_sample_value(f"cordillera_score_{name}", {"model": "current", **labels})


@pytest.fixture
def server(link: Callable[[str | Path], Path]) -> Iterator[Reloaded]:
    said: list[str] = []
    services = open_reloadable_services([f"current={link('one')}"], ServerConfig(), said.append)
    with listening(services) as address:
        yield Reloaded(services, address, said)


def expected(run: Path) -> tuple[float, str, int]:
    return float(cordillera.load_model(run).predict([ROW])[0]), run.name, step_of_weights(Run(run))


def test_clients_are_answered_by_one_of_two_models_while_one_replaces_the_other(
    server: Reloaded, made: Path, link: Callable[[str | Path], Path]
) -> None:
    one, two = expected(made / "one"), expected(made / "two")
    assert one[0] != two[0]
    assert one[2] != two[2]
    found: list[list[tuple[float, str, int]]] = [[] for _ in range(4)]
    failed: list[BaseException] = []
    done = threading.Event()

    def ask(place: int) -> None:
        try:
            with httpx.Client(base_url=server.client.base_url, timeout=SECONDS) as client:
                while not done.is_set():
                    found[place].append(server.score(client))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: all(found) or bool(failed), "nothing is answered")
        for run in ("two", "one", "two"):
            link(run)
            assert server.reload() == f"current answers with {run}, step {step_of_weights(Run(made / run))}"
            assert server.score() == (two if run == "two" else one)
        eventually(lambda: all(of_client[-1] == two for of_client in found) or bool(failed), "the old model answers")
    finally:
        done.set()
        for thread in threads:
            thread.join(SECONDS)
    assert not failed, failed
    assert {one, two} == {answer for of_client in found for answer in of_client}
    assert all(of_client[0] == one and of_client[-1] == two for of_client in found)
    assert server.metric("requests_total", status="ok") == sum(map(len, found)) + 3
    assert server.metric("reloads_total", status="ok") == 3
    assert server.metric("model_info", run="two", step=str(two[2])) == 1
    assert server.metric("model_info", run="one", step=str(one[2])) is None


def hold(service: Any) -> tuple[threading.Event, threading.Event]:
    """Let a service wait at its next batch, which sets the first event, until the second one is set."""
    entered, release, compute = threading.Event(), threading.Event(), service._batcher._compute

    def wait(requests: Any) -> Any:
        entered.set()
        assert release.wait(SECONDS)
        return compute(requests)

    service._batcher._compute = wait
    return entered, release


def test_a_request_that_was_read_before_ends_with_its_model_which_is_then_released(
    server: Reloaded, made: Path, link: Callable[[str | Path], Path]
) -> None:
    one, two = expected(made / "one"), expected(made / "two")
    service = server.services.scores["current"]
    model = weakref.ref(service.scorer.model)
    entered, release = hold(service)
    found: list[tuple[float, str, int]] = []
    thread = threading.Thread(target=lambda: found.append(server.score()))
    thread.start()
    assert entered.wait(SECONDS)
    link("two")
    server.reload()
    with httpx.Client(base_url=server.client.base_url, timeout=SECONDS) as client:
        assert server.score(client) == two
    late = service.submit(service.read([ROW]))  # was looked up before, and comes late
    gc.freeze()  # as a server does with what it has loaded
    release.set()
    thread.join(SECONDS)
    assert found == [one]
    assert late.result(SECONDS).scores[0, 0] == one[0]
    del service, late
    try:
        eventually(lambda: model() is None, "the earlier model is not released")
    finally:
        gc.unfreeze()


def test_weights_that_are_not_finite_are_found_before_clients_do(
    server: Reloaded, made: Path, link: Callable[[str | Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(*arguments: Any, **settings: Any) -> Any:
        scorer = open_scorer(*arguments, **settings)
        with torch.no_grad():
            next(scorer.model.parameters()).fill_(torch.nan)
        return scorer

    monkeypatch.setattr(opening, "open_scorer", spoilt)
    link("two")
    assert "the model's logit is nan" in server.reload()
    assert server.score() == expected(made / "one")


def damage(run: Path) -> None:
    [file] = checkpoints.folder_of(run / "checkpoints", step_of_weights(Run(run))).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])


def test_a_model_that_cannot_take_over_leaves_the_present_one_and_is_visible(
    server: Reloaded, made: Path, link: Callable[[str | Path], Path]
) -> None:
    one = expected(made / "one")
    damage(shutil.copytree(made / "two", made / "damaged"))
    price = '{{ name = "price" }}'
    train(made, "wider", RECIPE.replace(price, price + ', {{ name = "time" }}'))
    pl.read_csv(made / "log.csv").with_columns(pl.col("price").fill_null(0.0), like=1 - pl.col("click")).write_csv(
        made / "whole.csv"
    )
    whole = {"data.path": str(made / "whole.csv"), "training.max_steps": 1}
    train(made, "stricter", RECIPE.replace(price, '{{ name = "price", missing = "refuse" }}'), **whole)
    train(made, "other", RECIPE.replace('["click"]', '["click", "like"]'), **whole)
    coded = RECIPE.replace(price, '{{ name = "time" }}').replace('{{ name = "user" }}', '{{ name = "user" }}, ' + price)
    train(made, "coded", coded.replace("[" + '{{ name = "time" }}' + "]", "[]"), **whole)
    id_of = '{{ name = "small", encoding = "identity", num_embeddings = %d }}'
    table = RECIPE.replace('{{ name = "user" }}', '{{ name = "user" }}, ' + id_of)
    frame = pl.read_csv(made / "log.csv").with_columns(small=pl.int_range(pl.len()) % 5)
    frame.write_csv(made / "small.csv")
    small = {"data.path": str(made / "small.csv"), "training.max_steps": 1}
    readers = [RowReader(Encoder.load(train(made, f"id{rows}", table % rows, **small) / "encoder")) for rows in (20, 5)]
    sizes = [{column["name"]: column["rows"] for column in reloading._columns(reader)} for reader in readers]
    assert [one["small"] for one in sizes] == [20, 5]
    assert sizes[0]["user"] is None
    services = open_reloadable_services([f"current={link('id20')}"], ServerConfig())
    with listening(services) as address:
        link("id5")
        services.reload()
        facts = lambda: httpx.get(f"{address}/v1/models", timeout=SECONDS).json()["data"][0]  # noqa: E731
        eventually(lambda: "last_reload_failed" in facts(), "a model that refuses ids takes over")
        assert facts()["run"] == "id20"
    cases = [
        ("damaged", "is corrupt"),
        ("absent", "is not a run folder"),
        ("wider", "needs the column 'time', which rows do not have so far"),
        ("stricter", "takes no blanks in the column 'price'"),
        ("other", "scores click, like instead of click"),
        ("coded", "takes the column 'price' as id instead of number"),
    ]
    for number, (run, why) in enumerate(cases, 1):
        link(run)
        said = server.reload()
        assert said.startswith("current was not read again and answers as before: "), said
        assert why in said
        assert server.score() == one
        assert server.facts()["last_reload_failed"] is True
        assert server.facts()["run"] == "one"
        assert server.metric("reloads_total", status="error") == number
        assert server.metric("last_reload_successful") == 0
        assert server.client.get("/health").status_code == 200
    link("two")
    server.reload()
    assert server.score() == expected(made / "two")
    assert "last_reload_failed" not in server.facts()
    assert server.metric("last_reload_successful") == 1


def test_a_model_takes_over_if_it_takes_all_ids_so_far() -> None:
    frame = pl.DataFrame({"slot": [1, 2, 3, 4], "seen": [[1], [2, 3], [], [4]], "click": [0, 1, 0, 1]})
    kinds = {"any": {}, "few": {"encoding": "identity", "num_embeddings": 5}}
    kinds["many"] = kinds["few"] | {"num_embeddings": 20}

    def services(kind: str, **column: Any) -> Any:
        schema = Schema.model_validate({kind: [column], "labels": ["click"]})
        encoder = Encoder.fit(schema, [frame])
        return SimpleNamespace(tasks=("click",), encoder=encoder, reader=RowReader(encoder))

    single, lists = (
        {kind: services(key, name=name, **more) for kind, more in kinds.items()}
        for key, name in (("categorical", "slot"), ("lists", "seen"))
    )
    for made in (single, lists):
        for before, after in (("few", "any"), ("few", "many"), ("any", "any")):
            reloading._check_interface(made[after], made[before])
        with pytest.raises(RunError, match="below 5, so far below 20"):
            reloading._check_interface(made["few"], made["many"])
        with pytest.raises(RunError, match="below 20, so far any"):
            reloading._check_interface(made["many"], made["any"])


def test_the_step_is_that_of_the_weights_that_answer_and_not_the_last(made: Path, tmp_path: Path) -> None:
    keys = {"training.epochs": 6, "training.patience": 2, "training.learning_rate": 0.3}
    run = Run(train(made, "patient", **keys))
    status, best = run.status(), best_checkpoint(run, use_best=True).step
    assert status is not None
    assert best < status.step  # training went on after its best step
    services = open_reloadable_services([str(run.folder)], ServerConfig())
    with listening(services) as address:
        [found] = httpx.get(f"{address}/v1/models", timeout=SECONDS).json()["data"]
    assert (found["run"], found["step"], found["is_complete"]) == ("patient", best, True)


def test_a_run_of_a_sweep_and_a_link_keep_the_names_that_they_have(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "one", tmp_path / "lr=0.1")
    (tmp_path / "link").symlink_to(made / "two")
    services = open_reloadable_services(
        [f"{tmp_path}/lr=0.1", f"{tmp_path}/link", f"a={tmp_path}/link"], ServerConfig()
    )
    try:
        assert list(services.scores) == ["lr=0.1", "two", "a"]
        assert [facts["run"] for facts in services.facts.values()] == ["lr=0.1", "two", "two"]
    finally:
        services.close(SECONDS)


def test_a_server_that_stops_reads_nothing_again(server: Reloaded, link: Callable[[str | Path], Path]) -> None:
    before = list(server.said)
    link("two")
    server.services.leaving.set()
    server.services.reload()
    server.services.close(SECONDS)
    eventually(lambda: all(one.name != "reloader" for one in threading.enumerate()), "the reloader does not end")
    assert server.said == before


def test_the_step_of_a_language_run_is_that_of_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(files("cordillera.recipes").joinpath("llama-debug.toml").read_text())
    for step in (2, 4):
        (tmp_path / "checkpoints" / f"step-{step:09d}").mkdir(parents=True)
    run = Run(tmp_path)
    run.write_status("failed", 9, 10)
    with pytest.warns(UserWarning, match="training failed at step 9"):
        assert opening._facts_of_text(tmp_path) == {"run": tmp_path.name, "step": 4, "is_complete": False}
    assert opening._facts_of_text(Path("smollm2")) == {}
