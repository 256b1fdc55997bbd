"""The page of a run of replicas: every replica and fault is on it, whatever its size."""

from __future__ import annotations

import contextlib
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from cordillera.distributed.fault_tolerance.events import FOLDER, EventLog
from cordillera.distributed.fault_tolerance.goodput import TimeSpan, account
from cordillera.errors import RunError
from cordillera.recipe import dump, load
from cordillera.reports.language.replicas import _drawn, render_replicas, write_replicas_page
from cordillera.reports.language.run import render
from cordillera.run import Run
from cordillera.workflows.runs import report
from tests.distributed.test_goodput import SampleJob
from tests.reports.test_plan_page import browse, with_look
from tests.reports.test_ranking_report import Page
from tests.reports.test_templates import EVIL
from tests.training.sample_language_runs import make_model

SECTIONS = ["The replicas over time", "Faults", "Where the time goes", "Time of a step", "Stragglers", "Messages"]


def faulty_job(replicas: int = 3, steps: int = 60, every: int = 20) -> SampleJob:
    """A job in which a replica is killed and replaced every so many steps."""
    job = SampleJob(replicas, compute=[1.0] * (replicas - 1) + [2.0])
    for step in range(steps):
        if step % every == every // 2:
            job.attempt("discarded")
            job.tell("chaos", "fault", replica=job.names[step // every % replicas], what="kill", process=7)
            job.kill(job.names[step // every % replicas], f"{EVIL} at {step}")
        if step % every == every // 2 + 4:
            job.rejoin(job.names[step // every % replicas])
        job.attempt()
        if step % every == 0:
            job.pause()
    job.roll_back()
    job.attempt()
    job.tell("chaos", "fault", replica=None, what="corrupt-checkpoint", file="step-000000001/state.json")
    job.tell("coordinator", "refused", replica=job.names[0], why=f"{EVIL} refused")
    job.finish()
    return job


def run_of(job: SampleJob, folder: Path) -> Run:
    folder.mkdir()
    (folder / "recipe.toml").write_text(f'name = "run"\n[fault_tolerance]\nreplicas = {len(job.names)}\n')
    logs: dict[str, EventLog] = {}
    for event in job.events:
        writer = event["writer"]
        log = logs.setdefault(writer, EventLog(folder / FOLDER / f"{writer}.jsonl"))
        log.write(**{key: value for key, value in event.items() if key != "writer"})
    return Run(folder)


def test_the_report_has_the_faults_and_tells_a_save_from_standing_still_in_it(tmp_path: Path) -> None:
    job = SampleJob(2)
    for _ in range(2):
        job.attempt()
        job.now += 0.2  # saving
    job.now, job.members, job.epoch = job.now + 3.0, ["r1"], 2
    job.tell("coordinator", "epoch", epoch=2, step=2, members=["r1"])
    job.now -= 3.0
    job.attempt(ask=3.05)
    job.members, job.behind, job.is_new = ["r0", "r1"], {"r0"}, True
    for _ in range(2):
        job.attempt()
    job.finish()
    run = run_of(job, tmp_path / "run")
    run.write_json("model.json", make_model())
    for step, seconds in ((1, 0.2), (2, 3.3), (5, 0.2)):
        run.log({"kind": "checkpoint", "step": step, "tokens": step, "seconds": seconds, "bytes": 10})
    write_replicas_page(run)
    found = Page(render(run))
    text = " ".join(" ".join(found.text).split())
    assert "on 2 replicas, each of" in text
    assert re.search(r"Replicas 2 Processes of a replica \d+ Mesh of a replica", text)
    rows = text[text.index("replicas.html, beside this page") :]
    assert re.search(
        r"1, 2 training stood still for 0\.4 s in all.* Fault 2 r0: left out of epoch 2; .* 5 training", rows
    )


def test_the_page_has_every_replica_and_fault_and_escapes_texts(tmp_path: Path) -> None:
    job = faulty_job()
    path = write_replicas_page(run_of(job, tmp_path / "run"))
    assert path == tmp_path / "run" / "replicas.html"
    content = path.read_text()
    page = Page(content)
    assert [unescape(text) for text in re.findall(r"<h2>(.*?)</h2>", content)] == SECTIONS
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert "<script" not in content
    text = " ".join(page.text)
    for event in job.events:
        if event["kind"] in ("ended", "refused"):
            assert text.count(event["why"]) == (2 if event["kind"] == "ended" else 1)  # in the table, and its mark
    for name in job.names:
        assert name in text
    assert len([one for tag, one in page.tags if tag == "path" and "fault" in str(one.get("class"))]) == 3
    assert len([one for tag, one in page.tags if tag == "path" and "injected" in str(one.get("class"))]) == 4
    assert text.count("injected: kill") == 6  # in the table of messages, and each mark
    assert "injected: corrupt-checkpoint" in text
    assert "2.00 times" in text
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes["aria-label"]


def test_the_page_of_a_calm_run_says_so(tmp_path: Path) -> None:
    job = SampleJob(2)
    for _ in range(6):
        job.attempt()
    job.finish()
    text = " ".join(Page(write_replicas_page(run_of(job, tmp_path / "run")).read_text()).text)
    assert "No replica ended or disappeared." in text
    assert "No replica computes far slower than the others." in text


def test_a_job_that_ends_before_its_first_step_has_a_page() -> None:
    job = SampleJob(2)
    job.kill("r0")
    found = account(job.events, 2)
    assert found.goodput == 0
    assert "rank 0 was ended by SIGKILL" in render_replicas("run", found)


def test_a_run_without_events_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    job = SampleJob(2)
    job.attempt()
    run = run_of(job, tmp_path / "run")
    (run.folder / FOLDER / "r1.jsonl").unlink()
    with pytest.raises(RunError, match=r"replicas, r1\.jsonl"):
        write_replicas_page(run)
    for path in (run.folder / FOLDER).iterdir():
        path.unlink()
    with pytest.raises(RunError, match="replicas: there are no events"):
        write_replicas_page(run)
    (run.folder / "recipe.toml").write_text('name = "run"\n')
    with pytest.raises(RunError, match="not above 1"):
        write_replicas_page(run)


@pytest.mark.parametrize(
    ("replicas", "error", "pages"),
    [
        (1, None, ["report.html"]),
        (2, "r2.jsonl: is none of 2 replicas", ["report.html"]),
        (3, None, ["replicas.html", "report.html"]),
    ],
)
def test_a_run_that_goes_on_with_fewer_replicas_has_a_report(
    tmp_path: Path, replicas: int, error: str | None, pages: list[str]
) -> None:
    job = SampleJob(3)
    job.attempt()
    job.finish()
    run = run_of(job, tmp_path / "run")
    run.recipe_file.write_text(dump(load("llama-debug", {"fault_tolerance.replicas": replicas})))
    with pytest.raises(RunError, match=re.escape(error)) if error else contextlib.nullcontext():
        assert report(run) == run.folder / "report.html"
    assert sorted(path.name for path in run.folder.glob("*.html")) == pages


def test_a_run_whose_events_are_damaged_has_a_report(tmp_path: Path) -> None:
    job = SampleJob(2)
    job.attempt()
    run = run_of(job, tmp_path / "run")
    run.recipe_file.write_text(dump(load("llama-debug", {"fault_tolerance.replicas": 2})))
    damaged = run.folder / FOLDER / "r1.jsonl"
    damaged.write_text(damaged.read_text().replace("committed", "discarded"))
    with pytest.raises(RunError, match=r"r1\.jsonl"):
        report(run)
    assert [path.name for path in run.folder.glob("*.html")] == ["report.html"]


def test_a_lane_keeps_the_shares_of_what_is_too_short_to_be_seen() -> None:
    spans = [TimeSpan(0.0, 100.0, "starting")]
    for at in range(100, 400):
        spans += [TimeSpan(at, at + 0.75, "useful"), TimeSpan(at + 0.75, at + 1.0, "stalled")]
    spans += [TimeSpan(400.0, 499.9, "useful"), TimeSpan(499.9, 500.0, "paused"), TimeSpan(500.0, 600.0, "useful")]
    found = list(_drawn(spans, pixel=1.0))
    assert (found[0].start, found[0].end, found[-1].start, found[-1].end) == (0.0, 100.0, 400.0, 600.0)
    area: dict[str, float] = {}
    for one in found[1:-1]:
        area[one.style] = area.get(one.style, 0.0) + (one.end - one.start) * (one.high - one.low)
    assert area == pytest.approx({"f0": 225.0, "f5": 75.0}, rel=0.05)
    assert len(found) < 110


@pytest.mark.slow
def test_the_page_of_a_large_job_is_small() -> None:
    job = faulty_job(24, 10_000, 50)
    found = account(job.events, 24)
    assert len(found.faults) == 200
    content = render_replicas("run", found)
    Page(content)
    assert len(content) < 300_000
    assert content.count("<rect") + content.count("<path") < 2_000
    for name in job.names:
        assert f">{name}<" in content


@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_it_all_within_the_page(tmp_path: Path, width: int) -> None:
    page = tmp_path / "replicas.html"
    page.write_text(with_look(render_replicas("run", account(faulty_job().events, 3))))
    dump = browse(page, f"--window-size={width},3000", "--dump-dom")
    found: dict[str, Any] = json.loads(unescape(re.search(r'data-found="([^"]*)"', dump)[1]))  # type: ignore[index]
    assert found["headings"] == SECTIONS
    assert found["width"] <= found["window"]
    assert found["beyond"] == found["covered"] == []
