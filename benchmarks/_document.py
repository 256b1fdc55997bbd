"""Figures in the documentation, written from the result files: ``make figures``, and ``--check`` for ``make check``.

A block, such as a table, stands between ``<!-- figures: NAME -->`` and ``<!-- /figures -->``, each on a line of its own
with blank lines around it. A value in a sentence stands between ``<!-- figure: NAME -->`` and ``<!-- /figure -->``, and
never begins a line, where Markdown would take the comment for a block. The functions behind the names are in
``_figures_*.py``. A picture holds a digest of the figures that it shows.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import _figures_exchange
import _figures_faults
import _figures_gpu
import _figures_kernels
import _figures_language
import _figures_planning
import _figures_post_training
import _figures_precision
import _figures_ranking
import _figures_search
import _figures_serving
import _figures_tasks
import _figures_teachers
import _figures_transport
import _figures_zionex
from _figures import Figures

ROOT = Path(__file__).resolve().parent.parent
FIGURES: Figures = {
    **_figures_ranking.FIGURES,
    **_figures_tasks.FIGURES,
    **_figures_teachers.FIGURES,
    **_figures_precision.FIGURES,
    **_figures_language.FIGURES,
    **_figures_planning.FIGURES,
    **_figures_exchange.FIGURES,
    **_figures_faults.FIGURES,
    **_figures_transport.FIGURES,
    **_figures_zionex.FIGURES,
    **_figures_kernels.FIGURES,
    **_figures_gpu.FIGURES,
    **_figures_search.FIGURES,
    **_figures_serving.FIGURES,
    **_figures_post_training.FIGURES,
}
_MARKED = re.compile(r"(<!-- figure(s?): ([\w.-]+) -->)(.*?)(<!-- /figure\2 -->)", re.DOTALL)
_MARKER = re.compile(r"<!--\s*/?figures?\b.*?-->")


class Problem(NamedTuple):
    """A marker whose figure differs or cannot be written.

    Attributes:
        line: Line of the marker, from 1.
        marker: The marker.
        reason: What is wrong, for people.
        differs: Whether rewriting puts it right.
    """

    line: int
    marker: str
    reason: str
    differs: bool = False


class Picture(NamedTuple):
    """A picture that is drawn from result files.

    Attributes:
        path: Its SVG file, from the root of the repository.
        name: Name of the marker.
        digest: Function that returns a digest of what it shows.
        draw: Function that writes it.
    """

    path: str
    name: str
    digest: Callable[[], str]
    draw: Callable[[Path], None]

    @property
    def mark(self) -> str:
        """Comment at the end of the file."""
        return f"<!-- figures: {self.name} {self.digest()} -->\n"


PICTURES = (
    Picture(
        "docs/figures/wukong-scaling.svg",
        "scaling-laws",
        _figures_ranking.scaling_digest,
        _figures_ranking.draw_scaling,
    ),
    Picture("docs/figures/moe-finer.svg", "moe-finer", _figures_kernels.finer_digest, _figures_kernels.draw_finer),
)


def rewrite(text: str, figures: Mapping[str, Callable[[], str]]) -> tuple[str, list[Problem]]:
    """Return a page with its figures written anew, and what was wrong with its markers.

    Args:
        text: The page.
        figures: Functions that return the figures, by name.
    """
    problems: list[Problem] = []
    parts: list[str] = []
    end = 0
    for found in _MARKED.finditer(text):
        opening, block, name, old, closing = found.groups()
        line, new = text.count("\n", 0, found.start()) + 1, old
        refused = _refusal(text, found) or ("" if name in figures else "there is no figure of this name")
        if refused:
            problems.append(Problem(line, opening, refused))
        else:
            new = f"\n\n{figures[name]()}\n\n" if block else figures[name]()
            if new != old:
                problems.append(Problem(line, opening, _difference(old, new), differs=True))
        parts += [text[end : found.start()], opening, new, closing]
        end = found.end()
    # Only line ends of what was found stay, so that lines of the rest keep their numbers.
    rest = _MARKED.sub(lambda found: "\n" * found[0].count("\n"), text)
    for loose in _MARKER.finditer(rest):
        problems.append(Problem(rest.count("\n", 0, loose.start()) + 1, loose[0], "is not one of a pair"))
    return "".join([*parts, text[end:]]), sorted(problems)


def _refusal(text: str, found: re.Match[str]) -> str:
    """Return what is wrong with the place of a pair of markers, or nothing."""
    _, block, _, old, _ = found.groups()
    before = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
    if _MARKER.search(old):
        return "holds another marker"
    if block and (before or not old.startswith("\n") or not old.endswith("\n") or text[found.end() :][:1] not in "\n"):
        return "must stand alone on its line, as its end must"
    if not block and not re.search(r"\w", before):
        return "must not begin a line: Markdown would take the comment for a block"
    return ""


def _difference(old: str, new: str) -> str:
    """Return the first line that differs, as it is and as it should be."""
    before, after = old.strip().splitlines(), new.strip().splitlines()
    for was, becomes in zip_longest(before, after, fillvalue=""):
        if was != becomes:
            return f"is {was!r}, but the result file says {becomes!r}"
    return "needs blank lines around its rows"


def pages() -> Iterator[Path]:
    """Yield the pages of the documentation."""
    yield from (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    yield from sorted((ROOT / "docs").rglob("*.md"))


def _document(write: bool) -> Iterator[tuple[Path, Problem]]:
    """Yield what is wrong in every page and picture; with ``write``, put right what rewriting puts right."""
    used: set[str] = set()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        used |= {found[3] for found in _MARKED.finditer(text)}
        written, problems = rewrite(text, FIGURES)
        if write and written != text:
            page.write_text(written, encoding="utf-8")
        yield from ((page, problem) for problem in problems)
    for name in FIGURES:
        if name not in used:
            yield ROOT / "benchmarks", Problem(0, name, "is a figure that no page shows")
    for picture in PICTURES:
        path = ROOT / picture.path
        drawn = path.read_text(encoding="utf-8") if path.exists() else ""
        if not drawn.endswith(picture.mark):
            yield path, Problem(drawn.count("\n"), picture.name, "does not show the result file", differs=True)
            if write:
                picture.draw(path)
                path.write_text(path.read_text(encoding="utf-8") + picture.mark, encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Rewrite the figures, or with ``--check`` name those that differ; return 1 if something is left to do."""
    parser = argparse.ArgumentParser(description="Write the figures of the documentation from the result files.")
    parser.add_argument("--check", action="store_true", help="Change nothing; name what differs and end with 1.")
    check: bool = parser.parse_args(words).check
    left = 0
    for path, problem in _document(write=not check):
        done = problem.differs and not check
        left += not done
        place = f"{path.relative_to(ROOT)}:{problem.line}".removesuffix(":0")
        print(f"{place}: {problem.marker} {problem.reason}{' (rewritten)' if done else ''}")
    if check and left:
        print("`make figures` writes figures that differ; a marker that is refused needs an author")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
