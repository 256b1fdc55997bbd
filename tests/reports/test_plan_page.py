"""``plan.html`` as people see it: drawn to scale, checked as XML, and in a browser where there is one."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ET
import zlib
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from cordillera.planning import workloads
from cordillera.reports import plans as plan_pages
from cordillera.reports.language.plan import PARTS
from cordillera.workflows import planning

HEADINGS = [
    "The plan",
    "Beside the production-like plan",
    "Where a step goes",
    "The pipeline in time",
    "Memory of a device by pipeline rank",
    "If the network were different",
    "What if",
    "Network settings",
    "The best plans",
    "What was left out",
    "Constants of the cost model",
]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

# What a reader would see amiss: text beyond the page, and texts of a drawing that cover one another.
LOOK = """<script>
const found = {width: document.documentElement.scrollWidth, window: window.innerWidth, beyond: [], covered: [],
               texts: 0, headings: [...document.querySelectorAll("h2")].map(h => h.textContent)};
for (const svg of document.querySelectorAll("svg")) {
  const texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
  const frame = svg.getBoundingClientRect();
  found.texts += texts.length;
  texts.forEach(([name, box], i) => {
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
      found.beyond.push(name);
    for (const [other, at] of texts.slice(i + 1)) {
      const wide = Math.min(box.right, at.right) - Math.max(box.left, at.left);
      const high = Math.min(box.bottom, at.bottom) - Math.max(box.top, at.top);
      if (wide > 1 && high > 0.35 * box.height) found.covered.push(name + " and " + other);
    }
  });
}
document.body.setAttribute("data-found", JSON.stringify(found));
</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is written for 8 devices in two buildings, its pipeline four long."""
    where = tmp_path_factory.mktemp("page")
    changes = ["host.members=2", "pod.members=1", "building.members=1", "device.memory_bytes=40e9"]
    changes += ["region.distance_km=100", "device.nic_bytes_per_s=1e9"]  # too slow for sharded weights
    llama = workloads.load("llama3-8b")
    model = llama.model.model_copy(update={"layers": 4})  # few layers and microbatches are searched fast
    small = llama.model_copy(update={"batch": 32, "model": model})
    (where / "small.toml").write_text(tomlkit.dumps(small.model_dump(exclude_none=True)))
    faults: dict[str, Any] = {"slow": 1.2, "jitter": 0.5, "lose": ["building:1"], "what_if": ["region.loss_rate=1e-5"]}
    planning.plan(where / "small.toml", "two-buildings", where, changes=changes, compare=True, **faults)
    return where


def drawings(page: str) -> list[ET.Element]:
    """Every SVG of a page."""
    return [ET.fromstring(text) for text in re.findall(r"<svg .*?</svg>", page, re.DOTALL)]


def boxes(svg: ET.Element, *kinds: str) -> list[tuple[str, float, float, float]]:
    """Rectangles of a timeline: class, x, y and width."""
    pattern = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-\3z")
    found = []
    for path in svg.iter("path"):
        kind, text = path.get("class", ""), path.get("d", "")
        rest = pattern.sub("", text)
        assert not rest, f"not rectangles: {rest[:80]}"
        if kind in kinds:
            found += [(kind, float(m[1]), float(m[2]), float(m[3])) for m in pattern.finditer(text)]
    return found


def named(page: str, label: str) -> ET.Element:
    """The drawing with a label."""
    (svg,) = [one for one in drawings(page) if one.get("aria-label", "").startswith(label)]
    return svg


def test_every_section_is_there_and_every_drawing_is_xml(folder: Path) -> None:
    page = (folder / "plan.html").read_text()
    assert [unescape(one) for one in re.findall(r"<h2>(.*?)</h2>", page)] == HEADINGS
    assert len(drawings(page)) == 6
    plain = unescape(re.sub(r"<[^>]+>", " ", page))
    for text in ("one device 1.2 times as slow", "building:1 lost", "region.loss_rate=1e-5", "50 % longer on average"):
        assert text in plain
    assert not re.search(r"\b(nan|inf|None)\b", plain)
    content = json.loads((folder / "plan.json").read_text())
    assert [case["figures"]["kind"] for case in content["what_if"]] == ["change", "slow", "jitter", "lost"]
    assert content["what_if"][-1]["devices"] == 4
    tokens = content["workload"]["batch"] * content["workload"]["sequence"]
    (shown,) = re.findall(r"<dt>Tokens a second</dt><dd class=\"value\">([\d,]+)</dd>", page)
    assert int(shown.replace(",", "")) == round(tokens / content["plans"][0]["seconds"])


def test_the_timeline_is_every_action_to_scale(folder: Path) -> None:
    """Against the trace, which is written from the same simulation by other code."""
    svg = named((folder / "plan.html").read_text(), "What every pipeline rank does")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    actions = [one for one in events if one["ph"] == "X" and one["cat"] != "message"]
    messages = [one for one in events if one["ph"] == "X" and one["cat"] == "message"]
    drawn = boxes(svg, "forward", "backward", "weight")
    assert len({one["pid"] for one in actions}) >= 2
    assert Counter(one[0] for one in drawn) == Counter(one["cat"] for one in actions)
    assert len(boxes(svg, "message")) == len(messages)
    rows = sorted({y for _, _, y, _ in drawn})
    assert len(rows) == len({one["pid"] for one in actions})
    # the axis: seconds over their places
    texts = [(float(one.get("x", 0)), one.text or "") for one in svg.iter("text") if one.get("text-anchor") == "middle"]
    left, right = texts[0][0], texts[-1][0]
    total = max(one["ts"] + one["dur"] for one in actions)
    assert texts[0][1] == "0"
    assert float(texts[-1][1].split()[0]) * {"s": 1e6, "ms": 1e3}[texts[-1][1].split()[1]] == pytest.approx(total, 5e-3)
    scale = (right - left) / total
    expected = sorted((rows[one["pid"]], one["ts"], one["dur"], one["cat"]) for one in actions)
    for (kind, x, y, width), (row, start, seconds, category) in zip(
        sorted(drawn, key=lambda one: (one[2], one[1])), expected, strict=True
    ):
        assert (kind, y) == (category, row)
        assert x == pytest.approx(left + start * scale, abs=0.1)
        assert width == pytest.approx(max(seconds * scale - 0.3, 0.15), abs=0.02)  # a hair's breadth between two


def test_the_beginning_is_the_same_on_a_larger_scale(folder: Path) -> None:
    page = (folder / "plan.html").read_text()
    whole, part = (named(page, label) for label in ("What every pipeline rank does", "The beginning of a step"))
    all_of_it = sorted(boxes(whole, "forward", "backward", "weight"), key=lambda one: (one[2], one[1]))
    beginning = sorted(boxes(part, "forward", "backward", "weight"), key=lambda one: (one[2], one[1]))
    assert 0 < len(beginning) < len(all_of_it)
    for row in {one[2] for one in beginning}:
        ours = [one for one in beginning if one[2] == row]
        theirs = [one for one in all_of_it if one[2] == row][: len(ours)]
        assert [one[0] for one in ours] == [one[0] for one in theirs]
        scales = [b[3] / a[3] for a, b in zip(theirs[:-1], ours[:-1], strict=True) if a[3] > 5]
        assert all(one > 1 for one in scales)
    assert any(one.get("class") == "number" for one in part.iter("text"))


def test_bars_sum_to_the_step_and_to_the_memory(folder: Path) -> None:
    page = (folder / "plan.html").read_text()
    content = json.loads((folder / "plan.json").read_text())
    best = content["plans"][0]
    steps, memory = (named(page, label) for label in ("Parts of a step", "Memory by rank"))

    def lengths(svg: ET.Element) -> list[float]:
        rows: dict[str, list[ET.Element]] = {}
        for one in svg.iter("rect"):
            rows.setdefault(one.attrib["y"], []).append(one)
        for row in rows.values():  # each begins where the one before ends
            for a, b in itertools.pairwise(row):
                assert float(a.attrib["x"]) + float(a.attrib["width"]) == pytest.approx(float(b.attrib["x"]), abs=0.02)
        return [sum(float(one.attrib["width"]) for one in row) for row in rows.values()]

    drawn = lengths(steps)
    assert len(drawn) == 5  # production-like, three dimensions alone, this plan
    assert drawn[-1] / drawn[0] == pytest.approx(best["seconds"] / content["production"]["seconds"], rel=1e-3)
    labels = [one.text or "" for one in steps.iter("text")]
    assert labels[::2] == ["production-like", "placement alone", "scheduling alone", "network alone", "this plan"]
    assert labels[-1] == f"{best['seconds']:.2f} s"
    held = [sum(rank.values()) for rank in best["memory"]]
    drawn = lengths(memory)
    assert [one / max(drawn) for one in drawn] == pytest.approx([one / max(held) for one in held], rel=1e-3)
    (limit,) = [float(one.attrib["x1"]) for one in memory.iter("line")]
    first = float(next(memory.iter("rect")).attrib["x"])
    assert (limit - first) / max(drawn) == pytest.approx(40e9 / max(held), rel=1e-3)


def with_look(page: str) -> str:
    """A page that also says what a reader would see amiss, for which it has to run a script."""
    return page.replace("default-src 'none';", "").replace("</body>", f"{LOOK}</body>")


def browse(page: Path, *options: str) -> str:
    """Open a page in the browser; skips where there is none."""
    if BROWSER is None:
        pytest.skip("no chromium or chrome on PATH")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={page.parent}/user"]
    return subprocess.run(
        [BROWSER, *flags, *options, page.as_uri()], check=True, timeout=90, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_it_all_within_the_page(folder: Path, tmp_path: Path, width: int) -> None:
    page = tmp_path / "plan.html"
    page.write_text(with_look((folder / "plan.html").read_text()))
    dump = browse(page, f"--window-size={width},3000", "--dump-dom")
    found: dict[str, Any] = json.loads(unescape(re.search(r'data-found="([^"]*)"', dump)[1]))  # type: ignore[index]
    assert found["headings"] == HEADINGS
    assert found["width"] <= found["window"]
    assert found["texts"] > 50
    assert found["beyond"] == []
    assert found["covered"] == []
    assert dump.count("<svg") == 6


def pixels(png: bytes) -> tuple[int, int, list[bytes]]:
    """Width, bytes of a pixel and rows of a PNG of 8 bits a channel that is not interlaced (RFC 2083)."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, header = 8, b"", b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        header = body if kind == b"IHDR" else header
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    assert (depth, interlaced) == (8, 0)
    size = {2: 3, 6: 4}[colour]
    raw, rows, before = zlib.decompress(data), [], bytes(width * size)
    for y in range(height):
        begin = y * (width * size + 1)
        kind, row = raw[begin], bytearray(raw[begin + 1 : begin + 1 + width * size])
        for i in range(len(row)) if kind else ():
            a = row[i - size] if i >= size else 0
            b, c = before[i], before[i - size] if i >= size else 0
            if kind == 4:  # Paeth
                near = [abs(b - c), abs(a - c), abs(a + b - 2 * c)]
                predicted = (a, b, c)[near.index(min(near))]
            else:
                predicted = (0, a, b, (a + b) // 2)[kind]
            row[i] = (row[i] + predicted) & 255
        before = bytes(row)
        rows.append(before)
    return width, size, rows


def test_a_screenshot_shows_the_colours_of_the_plan(folder: Path, tmp_path: Path) -> None:
    page, shot = tmp_path / "plan.html", tmp_path / "page.png"
    page.write_text((folder / "plan.html").read_text())
    browse(page, "--window-size=700,1600", f"--screenshot={shot}")
    width, size, rows = pixels(shot.read_bytes())
    assert (width, len(rows)) == (700, 1600)
    colours = Counter(row[i : i + 3] for row in rows for i in range(0, len(row), size))
    total = width * len(rows)
    assert 0.5 < colours[b"\xff\xff\xff"] / total < 0.98  # paper, but not all of it
    for name, colour in {"forward": "3b7dd8", "backward": "e0813a", "tensor": "54b3a4"}.items():
        assert colours[bytes.fromhex(colour)] > 200, name
    ink = sum(count for (r, g, b), count in colours.items() if max(r, g, b) < 90)
    assert ink > 1000  # dark text


def test_times_over_a_property_of_the_network_are_named_point_by_point() -> None:
    plans = {"as planned": [0.5, 0.75], "production": [1.0, 2.0]}
    drawn = plan_pages._over([10.0, 300.0], plans, "km")
    assert drawn is not None
    assert drawn.chart is not None
    titles = re.findall(r"<title>([^<]*)</title>", str(drawn.chart.svg(1)))
    assert titles == [
        "as planned, 10: 500.0 ms",
        "as planned, 300: 750.0 ms",
        "production, 10: 1.00 s",
        "production, 300: 2.00 s",
    ]


def test_every_part_of_a_step_has_a_colour() -> None:
    style = (Path(plan_pages.__file__).parent / "templates/style.css").read_text()
    colours = [re.search(rf"--f{number}: (#[0-9a-f]{{6}});", style) for number in range(len(PARTS))]
    assert all(colours)
    assert len({one[1] for one in colours if one}) == len(colours)
    for number in range(len(colours)):
        assert f".f{number}" in style
