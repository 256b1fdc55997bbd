"""Scores over HTTP: exact numbers, mistakes named by row and field, limits, Arrow, metrics."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from cordillera.serving.http.scores import ARROW, score_router
from cordillera.serving.ranking.micro_batcher import OverloadError
from cordillera.serving.ranking.score_metrics import BOUNDS, ScoreMetrics
from cordillera.serving.ranking.score_service import ScoreService, ScoreServiceConfig

from .small_scorers import frame_of, rows, scorer

SCORER = scorer("dlrm", tasks=("click", "like"))
FACTS = {"run": "first", "step": 7}


class Server:
    """An application with one service of scores."""

    def __init__(self, **limits: Any) -> None:
        self.registry = CollectorRegistry()
        metrics = ScoreMetrics(self.registry)
        self.service = ScoreService("small", SCORER, ScoreServiceConfig(**limits), metrics, FACTS)
        metrics.show("small", FACTS, SCORER.encoder)
        self.app = FastAPI()
        self.app.include_router(score_router({"small": self.service}))
        self.client = TestClient(self.app)

    def post(self, content: Any, **headers: str) -> httpx.Response:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.client.post("/v1/score", content=body, headers={"content-type": "application/json", **headers})

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"cordillera_score_{name}", {"model": "small", **labels}) or 0.0


@pytest.fixture
def server():
    found = Server(max_request_rows=500)
    yield found
    found.service.close()


class Held:
    """Keeps a service's thread busy until it is released."""

    def __init__(self, service: ScoreService) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.service, self.compute = service, service._batcher._compute
        service._batcher._compute = self.wait

    def wait(self, requests):
        self.entered.set()
        assert self.release.wait(20)
        return self.compute(requests)

    def __enter__(self):
        self.first = self.service.submit(self.service.read(rows(1)), timeout=60)
        assert self.entered.wait(5)
        return self

    def __exit__(self, *exception):
        self.release.set()
        self.first.result(5)


def test_scores_in_json_are_the_numbers_to_the_bit(server) -> None:
    samples = rows(120, seed=4)
    expected = SCORER.score(frame_of(samples))
    for one in (samples, samples[:3], samples[7:8]):
        answer = server.post({"model": "small", "rows": one})
        assert answer.status_code == 200
        content = answer.json()
        assert [entry["index"] for entry in content["data"]] == list(range(len(one)))
        found = np.array([[entry["scores"]["click"], entry["scores"]["like"]] for entry in content["data"]])
        assert np.array_equal(found, expected[samples.index(one[0]) :][: len(one)])
        assert content["usage"] == {"rows": len(one)}
        assert (content["object"], content["model"]) == ("list", "small")
    assert server.count("requests_total", status="ok") == 3
    assert server.count("rows_total") == 124
    assert server.count("batch_rows_count") == 3
    assert server.count("request_seconds_count") == 3


def test_a_body_is_read_as_it_would_be_from_a_file(server) -> None:
    sample = rows(1, seed=4)[0]
    expected = server.post({"rows": [sample]}).json()["data"]
    # ids of a table of whole numbers may be text, and columns that are no features are ignored
    other = {**sample, "item": f"{sample['item']}.0", "seen": [*map(str, sample["seen"]), None, ""], "more": {"x": [1]}}
    assert server.post({"rows": [other]}).json()["data"] == expected
    assert len(sample["seen"]) > 1
    texts = {"seen": "|".join(map(str, sample["seen"])), "tags": "|".join(sample["tags"])}
    assert server.post({"rows": [{**sample, **texts}]}).json()["data"] == expected


def test_unknown_ids_are_scored_and_reported(server) -> None:
    samples = rows(3, seed=4)
    samples[0] |= {"user": "u1", "item": 3, "seen": [1], "tags": []}
    samples[1] |= {"user": "nobody", "item": 3, "seen": [999, 1, 998], "tags": []}
    samples[2] |= {"user": None, "item": 999, "seen": [], "tags": ["z"]}  # a blank is not unknown
    content = server.post({"rows": samples}).json()
    assert [entry.get("unknown") for entry in content["data"]] == [
        None, {"user": 1, "seen": 2}, {"item": 1, "tags": 1},
    ]  # fmt: skip
    assert content["unknown"] == {"user": 1, "item": 1, "seen": 2, "tags": 1}


def test_unknown_ids_blanks_and_probabilities_are_counted_once_for_each_scored_row(server) -> None:
    samples = rows(60, seed=4)
    samples[0] |= {"user": None, "price": None, "seen": [999, 998], "tags": []}
    assert server.count("unknown_ids_total", feature="tags") == 0  # counts begin before the first row
    assert (
        server.registry.get_sample_value("cordillera_score_unknown_ids_total", {"model": "small", "feature": "tags"})
        == 0
    )
    contents = [server.post({"rows": samples}).json(), server.post({"rows": samples[:5], "explain": True}).json()]
    assert server.post({"rows": [{**samples[0], "age": None}]}).status_code == 422  # is not scored
    counted = {"user": 0, "item": 0, "seen": 0, "tags": 0}
    for content in contents:
        for name, number in content["unknown"].items():
            counted[name] += number
    assert counted["seen"] >= 4
    for name, number in counted.items():
        assert server.count("unknown_ids_total", feature=name) == number, name
    both = samples + samples[:5]
    for name, blank in (("price", None), ("device", ""), ("seen", []), ("tags", [])):
        number = sum(sample[name] == blank for sample in both)
        assert number
        assert server.count("blanks_total", feature=name) == number, name
    assert server.count("blanks_total", feature="user") == 2
    for task in SCORER.tasks:
        found = np.array([entry["scores"][task] for content in contents for entry in content["data"]])
        assert server.count("probability_count", task=task) == 65
        assert server.count("probability_sum", task=task) == pytest.approx(found.sum(), rel=1e-12)
        for bound in BOUNDS:
            assert server.count("probability_bucket", task=task, le=str(bound)) == (found <= bound).sum()
        assert server.count("probability_bucket", task=task, le="+Inf") == 65
    assert server.count("model_info", run="first", step="7") == 1


def test_a_probability_on_a_bound_is_below_it() -> None:
    registry = CollectorRegistry()
    ScoreMetrics(registry).probabilities.observe("small", ("click",), np.array([[0.0], [0.5], [0.5], [1.0]]))
    labels = {"model": "small", "task": "click"}
    found = [
        registry.get_sample_value("cordillera_score_probability_bucket", {**labels, "le": le})
        for le in ("0.001", "0.4", "0.5", "0.99", "+Inf")
    ]
    assert found == [1, 1, 3, 3, 4]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"price": "12"}, "rows[1].price", "must be a number or null, got text"),
    ({"price": [1]}, "rows[1].price", "got a list"),
    (
        {"price": True},
        "rows[1].price",
        "must be a number or null, got a truth value (write 1 for true and 0 for false)",
    ),
    ({"age": False}, "rows[1].age", "must be a number, got a truth value"),
    ({"price": {"a": 1}}, "rows[1].price", "got an object"),
    ({"price": 10**400}, "rows[1].price", "does not fit into 64 bits"),
    ({"age": None}, "rows[1].age", "is null"),
    ({"age": 1e39}, "rows[1].age", "does not fit into 32 bits"),
    ({"user": ["u1"]}, "rows[1].user", "must be an id, got a list"),
    ({"user": {"id": 1}}, "rows[1].user", "must be an id, got an object"),
    ({"user": 1.5}, "rows[1].user", "must be an id, got the number 1.5"),
    ({"user": 2**63}, "rows[1].user", "beyond 64 bits"),
    ({"user": 1e17}, "rows[1].user", "must be an id"),
    ({"user": "x" * 2000}, "rows[1].user", "has 2000 characters"),
    ({"user": "\ud800"}, "rows[1].user", "surrogate"),
    ({"slot": None}, "rows[1].slot", "is null"),
    ({"slot": 8}, "rows[1].slot", "outside the table of 8 rows"),
    ({"slot": -1}, "rows[1].slot", "outside the table"),
    ({"slot": "third"}, "rows[1].slot", "not a whole number"),
    ({"slot": ""}, "rows[1].slot", "an id is blank"),
    ({"seen": 3}, "rows[1].seen", "must be a list of ids, got a number"),
    ({"seen": {"1": 2}}, "rows[1].seen", "got an object"),
    ({"seen": "1|" + "2" * 2000}, "rows[1].seen[1]", "has 2000 characters"),
    ({"seen": [1, [2]]}, "rows[1].seen[1]", "must be an id, got a list"),
    ({"seen": [1, 2, 0.5]}, "rows[1].seen[2]", "0.5"),
]


@pytest.mark.parametrize(("change", "place", "message"), BAD, ids=[str(change)[:24] for change, _, _ in BAD])
def test_a_bad_value_is_named_by_row_and_field(server, change, place: str, message: str) -> None:
    samples = rows(3, seed=4)
    samples[1] |= change
    answer = server.post({"rows": samples})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (place, "invalid_request_error")
    assert message in error["message"]
    assert error["message"].startswith(place)
    assert error["code"]
    assert server.count("requests_total", status="invalid") == 1
    assert server.post({"rows": samples[:1]}).status_code == 200  # the service goes on


@pytest.mark.parametrize("name", ["price", "age", "user", "item", "device", "slot", "seen", "tags"])
def test_a_missing_column_is_named_by_row_and_field(server, name: str) -> None:
    samples = rows(3, seed=4)
    del samples[2][name]
    error = server.post({"rows": samples}).json()["error"]
    assert (error["param"], error["code"]) == (f"rows[2].{name}", "missing_column")


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (b"{", 400, "body", "invalid_json"),
        (b"", 400, "body", "invalid_json"),
        (b"\xff\xfe", 400, "body", "invalid_json"),
        (b"[" * 100_000, 400, "body", "invalid_json"),
        (b'{"rows": [{"price": NaN}]}', 400, "body", "invalid_json"),
        (b'{"rows": [{"price": -Infinity}]}', 400, "body", "invalid_json"),
        (b'{"rows": [{"price": ' + b"9" * 5000 + b"}]}", 400, "body", "invalid_json"),
        (b"[]", 400, "body", "invalid_type"),
        (b"{}", 400, "rows", "missing_parameter"),
        (b'{"rows": []}', 422, "rows", "empty_rows"),
        (b'{"rows": {}}', 422, "rows", "invalid_type"),
        (b'{"rows": [[]]}', 422, "rows[0]", "invalid_type"),
        (b'{"rows": [null]}', 422, "rows[0]", "invalid_type"),
        (b'{"rows": [{}], "model": "other"}', 404, "model", "model_not_found"),
        (b'{"rows": [{}], "model": 3}', 400, "model", "invalid_type"),
        (b'{"rows": [{}], "explain": 1}', 400, "explain", "invalid_type"),
        (b'{"rows": [{}], "colour": 1}', 400, "colour", "unknown_parameter"),
    ],
)
def test_a_bad_body_is_refused(server, body: bytes, status: int, param: str, code: str) -> None:
    answer = server.post(body)
    assert answer.status_code == status
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)


def test_a_number_beyond_float64_is_no_silent_infinity(server) -> None:
    body = json.dumps({"rows": rows(1, seed=4)}).replace('"age": ', '"age": 1e999, "no": ', 1)
    error = server.post(body.encode()).json()["error"]
    assert (error["param"], error["code"]) == ("rows[0].age", "out_of_range")


def test_too_many_rows_are_refused(server) -> None:
    answer = server.post({"rows": rows(501)})
    assert answer.status_code == 413
    assert "at most 500 rows" in answer.json()["error"]["message"]
    answer = server.post({"rows": rows(65), "explain": True})
    assert answer.status_code == 413
    assert "at most 64 rows" in answer.json()["error"]["message"]


def test_rows_to_explain_that_would_never_fit_the_queue_are_refused() -> None:
    found = Server(max_queue_rows=40)  # each waits as one row and one for each of 8 features
    try:
        assert found.client.get("/v1/score/schema").json()["max_explained_rows"] == 4
        assert found.post({"rows": rows(4), "explain": True}).status_code == 200
        answer = found.post({"rows": rows(5), "explain": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
        assert "rows: at most 4 rows are explained at a time, got 5" in answer.json()["error"]["message"]
        assert found.count("requests_total", status="invalid") == 1
        assert found.post({"rows": rows(5)}).status_code == 200
    finally:
        found.service.close()


def arrow(table: pa.Table, *, file: bool = False, compression: str | None = None, rows: int = 50) -> bytes:
    sink, options = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(compression=compression)
    with (pa.ipc.new_file if file else pa.ipc.new_stream)(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("file", [False, True])
def test_rows_come_and_scores_go_in_arrow(server, file: bool) -> None:
    frame = frame_of(rows(300, seed=4))
    kind = "application/vnd.apache.arrow.file" if file else ARROW
    answer = server.post(arrow(frame.to_arrow(), file=file), **{"content-type": kind, "accept": ARROW})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == ARROW
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table.column_names == ["click", "like"]
    assert np.array_equal(np.stack([table["click"], table["like"]], 1), SCORER.score(frame))
    answer = server.post(arrow(frame.to_arrow(), file=file), **{"content-type": kind})
    assert answer.json()["data"][299]["scores"]["like"] == SCORER.score(frame)[299, 1]
    assert server.post({"rows": rows(2)}, accept=ARROW).headers["content-type"] == ARROW
    answer = server.post({"rows": rows(2), "explain": True}, accept=ARROW)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "explain", "invalid_value")
    assert "is answered in JSON only" in error["message"]


def test_mistakes_in_arrow_are_named(server) -> None:
    frame = frame_of(rows(5, seed=4))
    headers = {"content-type": ARROW}

    def refused(body: bytes) -> tuple[int, str, str]:
        answer = server.post(body, **headers)
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["message"]

    status, place, _ = refused(arrow(frame.drop("user").to_arrow()))
    assert (status, place) == (422, "rows.user")
    table = frame.to_arrow()
    index = table.column_names.index("age")
    for value, message in ((np.nan, "NaN"), (np.inf, "infinite"), (None, "blank")):
        ages = table["age"].to_pylist()
        ages[3] = value
        status, place, text = refused(arrow(table.set_column(index, "age", pa.array(ages, pa.float64()))))
        assert (status, place) == (422, "rows[3].age")
        assert message in text
    halves = pa.array([1.0, 2.0, 2.5, 3.0, 4.0])
    status, place, text = refused(arrow(table.set_column(table.column_names.index("user"), "user", halves)))
    assert (status, place) == (422, "rows[2].user")
    status, place, text = refused(arrow(table.set_column(index, "age", pa.array([[1.0]] * 5))))
    assert status == 422
    assert "age" in text
    whole = arrow(table)
    for cut in (0, 7, len(whole) // 2, len(whole) - 30):
        assert refused(whole[:cut])[:2] == (400, "body"), cut
    assert refused(arrow(frame[:0].to_arrow()))[1:2] == ("rows",)


@pytest.mark.parametrize("file", [False, True])
def test_compressed_arrow_is_read_unless_it_is_much_larger_than_its_request(server, file: bool) -> None:
    frame = frame_of(rows(300, seed=4))
    kind = "application/vnd.apache.arrow.file" if file else ARROW
    ages = pa.array(np.zeros(1 << 20))
    long = pa.DictionaryArray.from_arrays([0, 0], ["u" * (65 << 20)])
    bombs = [pa.table({"user": long}), pa.table({f"{number}": ages for number in range(9)})]
    for compression in ("zstd", "lz4"):
        answer = server.post(
            arrow(frame.to_arrow(), file=file, compression=compression), **{"content-type": kind, "accept": ARROW}
        )
        assert answer.status_code == 200
        found = pa.ipc.open_stream(answer.content).read_all()
        assert np.array_equal(np.stack([found["click"], found["like"]], 1), SCORER.score(frame))
        for bomb in bombs:
            body = arrow(bomb, file=file, compression=compression, rows=1 << 20)
            assert len(body) < 1 << 20
            answer = server.post(body, **{"content-type": kind})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, "body", "invalid_arrow")
            assert "more than 64 MiB (send fewer rows, or write Arrow without compression)" in error["message"]


def test_effects_are_those_of_ablation_by_hand(server) -> None:
    samples = rows(6, seed=4)
    content = server.post({"rows": samples, "explain": True}).json()
    frame = frame_of(samples)
    encoder = SCORER.encoder
    whole = SCORER.logits(encoder.encode(frame, labels=False))
    assert server.service.explained == ["price", "age", "rank", "user", "item", "device", "seen", "tags"]
    for name in server.service.explained:
        rows_without = encoder.encode(frame, labels=False)
        dense, singles = [f.name for f in encoder.schema.dense], [f.name for f in encoder.schema.categorical]
        if name in dense:
            rows_without.dense[:, dense.index(name)] = encoder.dense_state[name]["fill"]
        elif name in singles:
            rows_without.ids[:, singles.index(name)] = 0
        else:
            empty = [{**sample, name: []} for sample in samples]
            rows_without = encoder.encode(frame_of(empty), labels=False)
        without = SCORER.logits(rows_without)
        for index, entry in enumerate(content["data"]):
            assert entry["logits"] == {"click": whole[index, 0], "like": whole[index, 1]}
            for task, name_of_task in enumerate(("click", "like")):
                assert entry["effects"][name_of_task][name] == whole[index, task] - without[index, task]
    assert any(entry["effects"]["click"]["user"] != 0 for entry in content["data"])
    assert content == server.post({"rows": samples, "explain": True}).json()


def test_the_schema_describes_rows_that_are_scored(server) -> None:
    answer = server.client.get("/v1/score/schema")
    content = answer.json()
    assert [column["name"] for column in content["columns"]] == [
        "price", "age", "rank", "user", "item", "device", "slot", "seen", "tags",
    ]  # fmt: skip
    kinds = {column["name"]: (column["type"], column["nullable"]) for column in content["columns"]}
    assert kinds["price"] == ("number", True)
    assert kinds["age"] == ("number", False)
    assert kinds["slot"] == ("id", False)
    assert kinds["seen"] == ("ids", True)
    assert content["tasks"] == ["click", "like"]
    scored = server.post({"rows": [content["example"]]})
    assert scored.status_code == 200
    assert scored.json()["unknown"] == {}
    assert server.client.get("/v1/score/schema?model=other").status_code == 404


def test_overload_is_429_and_names_a_limit() -> None:
    server = Server(max_queue_rows=4)
    with Held(server.service):
        waiting = [server.service.submit(server.service.read(rows(2))) for _ in range(2)]
        answer = server.post({"rows": rows(1)})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert "queue of 4" in answer.json()["error"]["message"]
    assert [one.result(5).scores.shape for one in waiting] == [(2, 2), (2, 2)]
    assert server.count("requests_total", status="overload") == 1
    server.service.close()


def test_a_deadline_is_503_and_so_is_a_closed_service() -> None:
    server = Server(timeout=0.05)
    with Held(server.service):
        answer = server.post({"rows": rows(1)})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "deadline"
    assert server.count("queue_rows") <= 1
    assert server.service.close(5)
    answer = server.post({"rows": rows(1)})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "shutting_down"
    assert server.count("requests_total", status="deadline") == 1
    assert server.count("requests_total", status="closed") == 1


def test_a_weight_that_is_not_finite_fails_only_the_rows_that_use_it() -> None:
    import torch

    broken = scorer("dlrm", tasks=("click", "like"), seed=3)
    samples = rows(3, seed=4)
    position = broken.encoder.encode(frame_of(samples), labels=False).ids[1, 0]
    samples[0]["user"] = samples[2]["user"] = "nobody"
    with torch.no_grad():
        broken.model.tables.table("user")[position] = torch.nan
    service = ScoreService("small", broken)
    app = FastAPI()
    app.include_router(score_router({"small": service}))
    held = Held(service)
    with held:
        futures = [service.submit(service.read([one])) for one in samples]
    assert np.isfinite(futures[0].result(5).scores).all()
    assert np.isfinite(futures[2].result(5).scores).all()
    answer = TestClient(app).post("/v1/score", json={"rows": samples})
    assert answer.status_code == 500
    assert answer.json()["error"]["param"].startswith("rows[1].")
    service.close()


def test_clients_that_leave_are_forgotten() -> None:
    """A request whose client has closed the connection is not computed, and those of others are."""
    server = Server(timeout=20)

    async def leave() -> None:
        sent = iter([{"type": "http.request", "body": json.dumps({"rows": rows(3)}).encode(), "more_body": False}])

        async def receive() -> Any:
            message = next(sent, None)
            if message is None:
                await asyncio.sleep(0.02)
                return {"type": "http.disconnect"}
            return message

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http", "method": "POST", "path": "/v1/score", "headers": [(b"content-type", b"application/json")],
            "query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80), "root_path": "",
        }  # fmt: skip
        await asyncio.wait_for(server.app(scope, receive, send), 10)

    with Held(server.service):
        asyncio.run(leave())
        other = server.service.submit(server.service.read(rows(2)))
    assert other.result(5).scores.shape == (2, 2)
    assert server.count("requests_total", status="cancelled") == 1
    assert server.count("batch_rows_sum") == 3  # the held row, and the two of the other
    server.service.close()


def test_two_batches_are_never_computed_at_once_and_all_clients_are_answered() -> None:
    server = Server()
    samples = rows(200, seed=8)
    expected = SCORER.score(frame_of(samples))

    async def run() -> None:
        transport = httpx.ASGITransport(app=server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def ask(first: int) -> None:
                count = 1 + first % 4
                answer = await client.post("/v1/score", json={"rows": samples[first : first + count]})
                data = answer.json()["data"]
                assert [entry["scores"]["click"] for entry in data] == expected[first : first + count, 0].tolist()

            await asyncio.gather(*(ask(first) for first in range(0, 190, 3)))

    asyncio.run(run())
    assert server.count("batch_rows_count") < 64  # some were scored together
    assert server.count("requests_total", status="ok") == 64
    server.service.close()


def test_overload_error_is_the_one_of_the_batcher() -> None:
    service = ScoreService("small", SCORER, ScoreServiceConfig(max_queue_rows=1))
    with pytest.raises(OverloadError):
        service.submit(service.read(rows(2)))
    service.close()
