"""The script of the page at ``/``, in node: what it sends, and what it shows of answers and of their absence."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.serving.servers import SECONDS

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no node on PATH")

# Elements are remembered by id, `respond` is the server, `clock` is the time in milliseconds.
PAGE = """
const heard = {}, elements = {}, shown = [];
let clock = 0, submitted = 0, answer = null;
const element = id => ({ value: "", append() {}, after() {}, replaceChildren() {}, setAttribute() {}, focus() {},
                         requestSubmit() { submitted += 1; },
                         addEventListener(kind, listener) { heard[id + " " + kind] = listener; } });
globalThis.document = { getElementById: id => elements[id] ??= element(id), createElement: element,
                        createElementNS: element };
Object.defineProperty(globalThis, "performance", { value: { now: () => clock }, configurable: true });
let respond = async () => new Response('{"data": []}');
globalThis.fetch = async (path, given) => respond(path, given);
SCRIPT
const pause = () => new Promise(resolve => setTimeout(resolve, 20));
const until = async holds => { while (!holds()) await pause(); };
const submit = form => heard[form + " submit"]({ preventDefault() {} });
const click = id => elements[id].disabled || heard[id + " click"]();
const stream = () => new Response(new ReadableStream({ start(own) { answer = own; } }));
const tell = event => answer.enqueue(new TextEncoder().encode("data: " + JSON.stringify(event) + "\\n\\n"));
const word = text => tell({ choices: [{ delta: { content: text } }] });
const end = () => { answer.close(); answer = null; };
const ask = text => { $("prompt").value = text; return submit("ask"); };
(async () => {
  await pause();
SCENARIO
  console.log(JSON.stringify(shown));
  process.exit();
})();
"""


def shown(folder: Path, scenario: str) -> Any:
    """Return what a scenario pushes to the list ``shown``."""
    page = files("cordillera.serving.http").joinpath("page.html").read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    text = PAGE.replace("SCENARIO", scenario).replace("SCRIPT", script)
    (folder / "page.js").write_text(text, encoding="utf-8")
    found = subprocess.run(["node", folder / "page.js"], check=True, timeout=SECONDS, capture_output=True, text=True)
    return json.loads(found.stdout)


def test_a_new_chat_begins_with_what_the_user_says(tmp_path: Path) -> None:
    scenario = """
  respond = async (path, given) => {
    if (path === "/metrics") return new Response("");
    shown.push(JSON.parse(given.body).messages.map(one => one.role));
    return stream();
  };
  const first = ask("first");
  await until(() => answer);
  click("clear");
  word("yes");
  end();
  await first;
  const second = ask("second");
  await until(() => answer);
  end();
  await second;
  click("clear");
  ask("third");
  await until(() => answer);
"""
    assert shown(tmp_path, scenario) == [["user"], ["user", "assistant", "user"], ["user"]]


def test_times_and_rates_are_of_the_answer_alone(tmp_path: Path) -> None:
    """Metrics take a second each; an answer of five tokens has two pieces, 100 ms apart."""
    scenario = """
  respond = async path => {
    if (path === "/v1/chat/completions") return stream();
    clock += 1000;
    return new Response("");
  };
  const look = () => shown.push(["first", "rate", "count", "most"].map(id => $(id).textContent));
  const done = ask("hello");
  await until(() => answer);
  clock += 50;
  word("a");
  await until(() => $("count").textContent === 1);
  look();
  clock += 100;
  word("b");
  await until(() => $("count").textContent === 2);
  look();
  tell({ choices: [], usage: { completion_tokens: 5 } });
  end();
  await done;
  look();
"""
    first, second, last = shown(tmp_path, scenario)
    assert (first[0], first[2], first[3]) == ("50 ms", 1, "")
    assert second == ["50 ms", "10.0", 2, "; the highest bar is 100"]
    assert last == ["50 ms", "40.0", 5, "; the highest bar is 100"]


def test_a_message_that_is_refused_need_not_be_typed_again(tmp_path: Path) -> None:
    scenario = """
  let typed = "";
  respond = async path => {
    if (path === "/metrics") return new Response("");
    if (typed) $("prompt").value = typed;
    return new Response('{"error": {"message": "the queue is full"}}', { status: 429 });
  };
  await ask("a long message");
  shown.push($("prompt").value);
  typed = "another";
  await ask("a long message");
  shown.push($("prompt").value);
"""
    assert shown(tmp_path, scenario) == ["a long message", "another"]


def test_without_a_temperature_none_is_sent(tmp_path: Path) -> None:
    scenario = """
  respond = async (path, given) => {
    if (path !== "/metrics") shown.push(JSON.parse(given.body).temperature ?? "none");
    return new Response("", { status: path === "/metrics" ? 200 : 503 });
  };
  for (const value of ["", "0", "0.6"]) {
    $("temperature").value = value;
    await ask("hello");
  }
"""
    assert shown(tmp_path, scenario) == ["none", 0, 0.6]


def test_enter_sends_a_message_but_not_a_word_of_an_input_method(tmp_path: Path) -> None:
    scenario = """
  for (const more of [{ isComposing: true }, { keyCode: 229 }, { shiftKey: true }, {}]) {
    heard["prompt keydown"]({ key: "Enter", preventDefault() {}, ...more });
    shown.push(submitted);
  }
"""
    assert shown(tmp_path, scenario) == [0, 0, 0, 1]


def test_a_row_is_sent_as_it_was_typed(tmp_path: Path) -> None:
    scenario = """
  respond = async (path, given) => {
    shown.push(given.body);
    return new Response('{"data": [{"scores": {"click": 0.5}}]}');
  };
  $("score-model").value = 'a"b';
  $("explain").checked = true;
  for (const row of ['{"user": 9007199254740993, "price": 1e400}', "}, {"]) {
    $("fields").value = row;
    await submit("rank");
  }
  shown.push($("scores").className, $("scores").textContent.split(":")[0]);
"""
    body, *told = shown(tmp_path, scenario)
    assert '"rows": [{"user": 9007199254740993, "price": 1e400}]' in body
    assert {key: value for key, value in json.loads(body).items() if key != "rows"} == {"model": 'a"b', "explain": True}
    assert told == ["error", "The row is not JSON"]


def test_a_server_that_cannot_be_reached_or_is_not_this_one_is_told(tmp_path: Path) -> None:
    scenario = """
  $("fields").value = "{}";
  $("explain").checked = false;
  respond = async () => { throw new TypeError("fetch failed"); };
  await submit("rank");
  shown.push($("scores").className, $("scores").textContent);
  respond = async () => new Response("<html>", { status: 502, statusText: "Bad Gateway" });
  await connect();
  shown.push($("state").className, $("state").textContent);
"""
    assert shown(tmp_path, scenario) == [
        *("error", "The server does not answer: fetch failed"),
        *("state bad", "502 Bad Gateway"),
    ]
