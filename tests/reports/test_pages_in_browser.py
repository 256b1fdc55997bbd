"""Pages on wide and narrow screens, light and dark: no table is cut, no word is split, no chart is oversized."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from cordillera.reports.language.run import render as render_language
from cordillera.reports.ranking.comparison import compare
from cordillera.reports.ranking.quantization import quantization_page
from cordillera.reports.ranking.run import render as render_ranking
from cordillera.reports.studies import comparison_page
from tests.training.sample_language_runs import make_language_run, make_records
from tests.training.sample_runs import make_run

from .test_comparison import family
from .test_plan_page import browse
from .test_quantization_report import CONTENT

# What a reader would see amiss; sizes in pixels of the page.
LOOK = """<script>addEventListener("load", () => {
const found = {scheme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
               width: document.documentElement.scrollWidth, cut: [], split: [], white: [], charts: []};
for (const one of document.querySelectorAll(".scroll:not(.wide)"))
  if (one.scrollWidth > one.clientWidth + 1) found.cut.push(one.ariaLabel);
for (const one of document.querySelectorAll(".charts svg"))
  found.charts.push(one.getBoundingClientRect().width);
const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode;
  if (!node.parentElement.closest("th, td, dt, p, li, figcaption, h2, h3")) continue;
  for (const word of node.data.matchAll(/[A-Za-z]+/g)) {
    const range = document.createRange();
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) found.split.push(word[0]);
  }
}
for (const one of document.querySelectorAll("body, body *")) {
  const style = getComputedStyle(one);
  const shown = one instanceof SVGElement ? style.fill : style.backgroundColor;
  const isText = one instanceof SVGTextElement || one.closest("marker, title, clipPath");
  if (!isText && shown === "rgb(255, 255, 255)") found.white.push(one.tagName + "." + one.getAttribute("class"));
}
parent.postMessage(found, "*");
})</script>"""
FRAME = """<meta name="color-scheme" content="light dark"><body style="margin:0">
<iframe src="page.html" style="border:0;width:{width}px;height:900px"></iframe>
<script>addEventListener("message", e => document.body.setAttribute("data-found", JSON.stringify(e.data)))</script>"""


def looked(folder: Path, text: str, width: int, scheme: str) -> dict[str, Any]:
    """What is amiss on a page in a frame of a width, since windows have a least width."""
    shown = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    (folder / "page.html").write_text(shown.replace("</body>", f"{LOOK}</body>"))
    (folder / "frame.html").write_text(FRAME.format(width=width))
    preferred = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    options = (preferred, "--allow-file-access-from-files", "--virtual-time-budget=3000", "--window-size=1300,1000")
    dump = browse(folder / "frame.html", *options, "--dump-dom")
    match = re.search(r'data-found="([^"]*)"', dump)
    assert match is not None
    return dict(json.loads(unescape(match[1])))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    runs = [*family(folder, "dlrm", {1: 0.9, 2: 1.2}), *family(folder, "wukong", {1: 0.4, 2: 0.6})]
    return {
        "ranking": render_ranking(make_run(folder / "ranking")),
        "language": render_language(make_language_run(folder / "language")),
        "short": render_language(make_language_run(folder / "short", records=make_records(100)[:1])),
        "quantised": quantization_page(CONTENT),
        "comparison": comparison_page(compare(runs)),
    }


@pytest.mark.cases(2)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
@pytest.mark.parametrize("name", ["ranking", "language", "short", "quantised", "comparison"])
def test_a_reader_finds_nothing_amiss(
    pages: dict[str, str], tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    found = looked(tmp_path, pages[name], width, scheme)
    assert found["scheme"] == scheme
    assert found["width"] <= width
    assert found["cut"] == []
    assert found["split"] == []
    assert all(chart < 540 for chart in found["charts"]), "one alone is as large as one of two"
    if scheme == "dark":
        assert found["white"] == []


def test_what_is_amiss_is_seen(tmp_path: Path) -> None:
    """The look itself: a page with every fault."""
    page = """<meta http-equiv="Content-Security-Policy" content="x"><body><main><div class="scroll" aria-label="wide"
      style="width:90px;overflow:auto"><table style="background:#fff"><td style="white-space:nowrap">a b c d e f g h i j
      k l m n</td></table></div><p style="width:30px;overflow-wrap:anywhere">unbreakable</p>
      <div class="charts"><svg viewBox="0 0 480 280" style="width:100%"></svg></div></main></body>"""
    found = looked(tmp_path, page, 1280, "dark")
    assert found["cut"] == ["wide"]
    assert found["split"] == ["unbreakable"]
    assert found["white"] == ["TABLE.null"]
    assert found["charts"][0] > 1000
