"""Search for the architecture of a ranking model: candidates proposed, tried, recorded and compared."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cordillera import recipe as recipes
from cordillera.data.ranking.datasets import prepare
from cordillera.distributed.job.job import handling
from cordillera.errors import DataError, Interrupted, PlanError, RecipeError, RunError
from cordillera.files import parse_json, parse_toml
from cordillera.mistakes import differences, few
from cordillera.models.ranking.graphs.config import short_digest
from cordillera.models.ranking.graphs.nasrec import from_nasrec, is_nasrec
from cordillera.recipe import RankingRecipe
from cordillera.reports import page
from cordillera.reports.ranking.architectures import chosen_settings, search_page
from cordillera.run import SEARCH_FILE, Run, read_recipe, write_atomically
from cordillera.training.ranking.architecture_search.searchers import (
    Goal,
    LearntSearcher,
    Searcher,
    SearchScore,
    front,
    make_searcher,
)
from cordillera.training.ranking.architecture_search.space import Genome, SearchSpace, SpaceConfig, load_space
from cordillera.workflows.architectures.trials import SearchTrial, TrialConfig, load_supernet, with_overrides
from cordillera.workflows.architectures.workers import TrialWorkers
from cordillera.workflows.processes import Say, silent

FRONT_FOLDER = "front"
"""Folder in a search's folder with a recipe of each architecture of the front."""


_WORDS = {
    "most_flops": "most FLOPs an example",
    "most_parameters": "most parameters",
    "sample": "share of the data in the first training",
    "sample_ne": "highest NE after the first training",
    "supernet": "supernet",
    "fine_tune": "steps from the supernet's weights",
    "seeds": "trainings of a candidate",
}


class SearchConfig(BaseModel):
    """Settings of a search.

    Attributes:
        searcher: Name of the searcher: ``evolution``, ``predictor``, ``random``, ``grid``, ``tpe``, ``nsga2`` or
            ``learnt``.
        chances: Run of a supernet with learnt draws, for the searcher ``learnt``.
        goal: ``ne``: the lowest NE; ``front``: the front of NE and FLOPs.
        trials: Number of proposals of the searcher; it may end earlier, if the space has fewer architectures.
        batch: Number of proposals that are made before their results are known; the path depends on it.
        seed: Seed of the searcher.
        trial: Settings of every trial.
        most_seconds: Time after which a trial is given up.
        judge: Number of new seeds with which the architectures of the front are trained in the end, to score the test
            split; 0 leaves the test split unread.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    searcher: str = "evolution"
    chances: str | None = None
    goal: Goal = "front"
    trials: int = Field(64, ge=0, le=10**6)
    batch: int = Field(4, ge=1, le=1024)
    seed: int = Field(0, ge=0)
    trial: TrialConfig = TrialConfig()
    most_seconds: float = Field(3600.0, gt=0)
    judge: int = Field(0, ge=0, le=100)


@dataclass(frozen=True)
class SearchCandidate:
    """A candidate on record.

    Attributes:
        number: Place in the search, from 0.
        name: Name of the architecture, 16 hexadecimal digits.
        origin: ``search`` or ``proposal``.
        overrides: Keys of the recipe with their values.
        trial: Result of its trial.
    """

    number: int
    name: str
    origin: str
    overrides: dict[str, Any]
    trial: SearchTrial

    @property
    def settings(self) -> str:
        """Keys of the recipe with their values in one line, without the keys of a graph."""
        return chosen_settings(self.overrides)

    @property
    def score(self) -> SearchScore:
        """NE and FLOPs."""
        return SearchScore(self.trial.ne, self.trial.flops)


@dataclass
class SearchOutcome:
    """Result of :func:`search`.

    Attributes:
        folder: Folder of the search.
        candidates: Candidates in order.
        front: Those that no other dominates, by FLOPs.
        report: Page that draws them.
        judged: Trials with new seeds of the front's architectures, by name, with the NE of the test split.
        is_exhausted: Whether the space has no further architecture.
        is_out_of_time: Whether the hours were over before all candidates were tried.
        best: The one of the lowest NE, over the new seeds if the front was judged; None if none was trained.
    """

    folder: Path
    candidates: list[SearchCandidate]
    front: list[SearchCandidate]
    report: Path
    judged: dict[str, SearchTrial] = field(default_factory=dict)
    is_exhausted: bool = False
    is_out_of_time: bool = False
    best: SearchCandidate | None = field(init=False)

    def __post_init__(self) -> None:
        self.best = min(self.front, key=lambda one: self.judged.get(one.name, one.trial).ne, default=None)


OnCandidate = Callable[[SearchCandidate, int], None]


def search(
    source: str | Path | RankingRecipe,
    space: str | Path | SpaceConfig,
    config: SearchConfig | None = None,
    *,
    overrides: Sequence[str] = (),
    proposals: Sequence[Mapping[str, Any]] = (),
    folder: Path | str | None = None,
    workers: int | None = None,
    hours: float | None = None,
    on_candidate: OnCandidate | None = None,
    say: Say = silent,
) -> SearchOutcome:
    """Search for architectures of a recipe's model, chosen by the validation split.

    The test split is read only in the end, with ``config.judge``, by trainings with new seeds. A search that was
    stopped is continued by the same call, and takes the path that it would have taken: trials on record are not made
    again. Results do not depend on the number of workers. These are processes that import the calling script, where the
    call therefore stands under ``if __name__ == "__main__"``.

    Args:
        source: Name of a shipped recipe, a path, or a recipe.
        space: Search space, or its file.
        config: Settings; None for the defaults.
        overrides: Overrides ``section.key=value`` of the recipe.
        proposals: Candidates from outside, tried first: each the keys ``section.key`` with their values, such as
            ``{"model": {...}}``.
        folder: Folder of the search. Default: ``runs/NAME-search``.
        workers: Number of processes, of one thread each. Default: one for each core.
        hours: Hours after which no further candidate begins, nor any that would end later, by the mean time of those
            before; the same call goes on. The front is judged in any case. Default: no limit.
        on_candidate: Function called with every candidate in order, and the planned number of candidates.
        say: Function called with one line of text at each stage.

    Raises:
        RecipeError: If the recipe or the space is not valid, or not of a ranking model.
        PlanError: If there is no such searcher, or the space has one architecture only.
        RunError: If the folder holds another search, or another process writes it.
        Interrupted: After Ctrl-C, SIGTERM or SIGHUP; all finished trials are saved.
    """
    config = config or SearchConfig()
    settings = load_space(space) if isinstance(space, str | Path) else space
    recipe = recipes.load(source, overrides)
    if not isinstance(recipe, RankingRecipe):
        raise RecipeError(str(source), [("model.name", "a search is for ranking models")])
    _check_recipe(recipe)
    content = recipe.model_dump(mode="json", exclude_none=True)
    made = SearchSpace(settings, content["model"])
    searcher = _make_searcher(config, made)
    _check_keys(content, made.overrides((0,) * len(made.genes)), settings)
    if config.trial.supernet is not None:
        load_supernet(config.trial.supernet)  # report its errors here rather than for each candidate
    described = {
        "space": _identity(SpaceConfig, settings.model_dump(mode="json")),
        "config": _identity(SearchConfig, config.model_dump(mode="json"), ("trials", "judge")),
        "proposals": [short_digest(one) for one in proposals],
    }
    run = _open(Path(folder) if folder is not None else Path("runs") / f"{recipe.name}-search", recipe, described)
    with run.lock(), _stopped_by_signals():
        run.rewind_metrics(0)  # keeps all records, but not the part of a line that a killed process left
        planned = len(proposals) + config.trials
        run.write_status(None, 0, planned)
        say(f"data: {recipe.data.label}")
        splits = prepare(recipe.data)
        for split, needed in (("validation", True), ("test", config.judge > 0)):
            if needed and not len(getattr(splits, split)):
                raise DataError(f"a search needs a {split} split", where="data.fractions", remedy="give it a share")
        say(f"space: {made.size:,} combinations of {len(made.genes)} decisions; searcher: {config.searcher}")
        found = _OpenSearch(run, made, searcher, config, content, proposals)
        found.ends = math.inf if hours is None else time.monotonic() + 3600 * hours
        with TrialWorkers(workers or os.cpu_count() or 1, content, config.trial, config.most_seconds) as pool:
            try:
                for candidate in found.candidates(pool):
                    if on_candidate is not None:
                        on_candidate(candidate, planned)
                judged = found.judge(workers, say)
            except KeyboardInterrupt:
                raise Interrupted(
                    f"{len(found.done)} trials are saved", where=str(run.folder), remedy="give the same command again"
                ) from None
        outcome = _finish(run, content, found, judged)
        ended = "exhausted" if found.is_exhausted else "interrupted" if outcome.is_out_of_time else "finished"
        run.write_status(ended, len(found.done), planned)
        return outcome


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C, SIGTERM and SIGHUP; outside the main thread, signals are not handled."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with handling(stop) if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
        yield


def _identity(kind: type[BaseModel], settings: Any, free: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """Return all settings but those that are ``free``; None if they are not valid."""
    try:
        return kind.model_validate(settings).model_dump(mode="json", exclude_none=True, exclude=set(free))
    except ValidationError:
        return None


def _check_recipe(recipe: RankingRecipe) -> None:
    """Refuse what trials, which train in one process on a CPU and with tables in memory, would leave out.

    Raises:
        RecipeError: If the recipe has such a key.
    """
    left_out = {
        "training.plan": recipe.training.plan is not None,
        "training.start": recipe.training.start is not None,
        "training.slices": recipe.training.slices > 1,
        "tables.storage": recipe.tables.storage == "file",
        "parallel.processes": recipe.parallel.processes > 1,
    }
    problems = [
        (key, "is not for searches, whose candidates train alone, in memory and from the beginning")
        for key, has in left_out.items()
        if has
    ]
    if problems:
        raise RecipeError(recipe.name, problems)


def _make_searcher(config: SearchConfig, space: SearchSpace) -> Searcher:
    if config.searcher != "learnt":
        return make_searcher(config.searcher, space, config.seed, config.goal)
    chances = {} if config.chances is None else load_supernet(config.chances).chances()
    if not chances:
        remedy = "train one with model.draw = 'learnt', and name its run"
        raise PlanError("'learnt' needs a supernet that has learnt to draw", where="supernet", remedy=remedy)
    return LearntSearcher(space, config.seed, config.goal, chances=chances)


def _check_keys(content: dict[str, Any], overrides: dict[str, Any], settings: SpaceConfig) -> None:
    """Refuse a space whose keys the recipe does not know; values are the candidates' own matter.

    If the space chooses among kinds of models, keys may be of some of them only.
    """
    if "model.name" in settings.choices:
        return
    try:
        with_overrides(content, overrides)
    except RecipeError as error:
        named = [(key, why) for key, why in error.problems if key in settings.choices and "is not a key" in why]
        if named:
            raise RecipeError("space", named, "search space") from error


def _open(folder: Path, recipe: RankingRecipe, described: dict[str, Any]) -> Run:
    """Create the folder of a search, or open the existing folder of the same search."""
    text = recipes.dump(recipe)
    if not (folder / "recipe.toml").is_file():
        run = Run.create(folder, text)
        run.write_json(SEARCH_FILE, described)
        return run
    run = Run(folder, of_search=True)
    if not (folder / SEARCH_FILE).is_file():
        if run.status() is not None:
            raise RunError("holds no search", where=str(folder), remedy="choose another --run folder")
        run.write_json(SEARCH_FILE, described)  # an earlier process was killed before it wrote this
    saved = run.read_json(SEARCH_FILE)
    # settings that are newer than it have their defaults
    saved["config"] = _identity(SearchConfig, saved.get("config", {}), ("trials", "judge"))
    saved["space"] = _identity(SpaceConfig, saved.get("space", {}))
    differs = [key for key, value in described.items() if saved.get(key) != json.loads(json.dumps(value))]
    if read_recipe(run)[0] != text:
        differs.append("recipe")
    if differs:
        what = " and ".join(sorted(differs))
        raise RunError(
            f"holds a search of another {what} ({_what_differs(saved, described, run, text)})",
            where=str(folder),
            remedy="choose another --run folder",
        )
    return run


def _what_differs(saved: dict[str, Any], described: dict[str, Any], run: Run, text: str) -> str:
    now = json.loads(json.dumps(described))
    before = {**{key: saved.get(key) for key in now}, "recipe": read_recipe(run)[1]}
    return few(differences(before, {**now, "recipe": parse_toml(text, "recipe")}))


class _OpenSearch:
    """One pass over the candidates of a search, those on record and new ones."""

    def __init__(
        self,
        run: Run,
        space: SearchSpace,
        searcher: Searcher,
        config: SearchConfig,
        content: dict[str, Any],
        proposals: Sequence[Mapping[str, Any]],
    ) -> None:
        self.run, self.space, self.searcher, self.config = run, space, searcher, config
        self.content, self.proposals = content, proposals
        self.record = {entry["number"]: entry for entry in run.metrics() if entry.get("kind") == "candidate"}
        self.done: list[SearchCandidate] = []
        self.seconds: list[float] = []  # times of the trials of this call
        self.is_exhausted, self.ends = False, math.inf

    def candidates(self, pool: TrialWorkers) -> Iterator[SearchCandidate]:
        """Yield candidates in order, as long as there is time."""
        given = [(short_digest(one), dict(one)) for one in self.proposals]
        yield from self._tried("proposal", given, pool)
        proposed = 0
        while proposed < self.config.trials and len(self.done) == len(given) + proposed:  # all had time
            genomes: list[Genome] = []
            while len(genomes) < min(self.config.batch, self.config.trials - proposed):
                genome = self.searcher.ask()
                if genome is None:
                    self.is_exhausted = not genomes
                    break
                genomes.append(genome)
            if not genomes:
                break
            proposed += len(genomes)
            batch = [(self.space.identify(genome), self.space.overrides(genome)) for genome in genomes]
            for candidate, genome in zip(self._tried("search", batch, pool), genomes, strict=False):
                self.searcher.tell(genome, candidate.score)
                yield candidate

    def _has_time(self) -> bool:
        """Return whether a candidate that begins now would end in time, by the mean time of those before."""
        return time.monotonic() + (fmean(self.seconds) if self.seconds else 0.0) < self.ends

    def _tried(
        self, origin: str, batch: list[tuple[str, dict[str, Any]]], pool: TrialWorkers
    ) -> Iterator[SearchCandidate]:
        start, results = len(self.done), {}
        for place, (name, _) in enumerate(batch):
            entry = self.record.get(start + place)
            if entry is not None:
                if entry["name"] != name:
                    raise RunError(
                        f"candidate {start + place} on record is {entry['name']}, the search proposes {name}",
                        where=str(self.run.folder),
                        remedy="it was made by another version of this program: choose another --run folder",
                    )
                results[place] = SearchTrial.from_dict(entry)
        yield from self._in_order(origin, batch, results, start)
        todo = [place for place in range(len(batch)) if place not in results]
        for index, trial in pool.try_all([batch[place][1] for place in todo], self._has_time):
            self.seconds.append(trial.seconds)
            place = todo[index]
            results[place] = trial
            name, overrides = batch[place]
            head = {"kind": "candidate", "number": start + place, "name": name, "origin": origin}
            self.run.log({**head, "overrides": overrides, **trial.to_dict()})
            yield from self._in_order(origin, batch, results, start)

    def _in_order(
        self, origin: str, batch: list[tuple[str, dict[str, Any]]], results: Mapping[int, SearchTrial], start: int
    ) -> Iterator[SearchCandidate]:
        """Yield the next candidates of a batch, as far as all before them have results."""
        while (place := len(self.done) - start) in results:
            name, overrides = batch[place]
            self.done.append(SearchCandidate(start + place, name, origin, overrides, results[place]))
            yield self.done[-1]

    def front(self) -> list[SearchCandidate]:
        """Return the candidates that no other dominates, by FLOPs."""
        return _front_of(self.done)

    def judge(self, workers: int | None, say: Say) -> dict[str, SearchTrial]:
        """Train the architectures of the front with new seeds and score the test split; return the trials by name."""
        seeds, best = self.config.judge, self.front()
        if not seeds or not best:
            return {}
        known = {
            entry["name"]: SearchTrial.from_dict(entry)
            for entry in self.run.metrics()
            if entry.get("kind") == "judged" and entry["seeds"] == seeds
        }
        todo = [one for one in best if one.name not in known]
        say(f"judge: the front ({len(best)}) by the test split, new seeds for each: {seeds}")
        content = {**self.content, "seed": self.content["seed"] + self.config.trial.seeds}
        config = TrialConfig(sample=0, seeds=seeds, test=True)
        with TrialWorkers(workers or os.cpu_count() or 1, content, config, self.config.most_seconds * seeds) as pool:
            for index, trial in pool.try_all([one.overrides for one in todo]):
                name = todo[index].name
                known[name] = trial
                self.run.log({"kind": "judged", "name": name, "seeds": seeds, **trial.to_dict()})
                found = f"NE {trial.ne:.4f} (validation), {trial.test_ne:.4f} (test)"
                say(f"  {name}  {found if trial.is_finished else f'died: {trial.stage}: {trial.why}'}")
        return {one.name: known[one.name] for one in best}


def _front_of(tried: Sequence[SearchCandidate]) -> list[SearchCandidate]:
    finished = [one for one in tried if one.trial.is_finished]
    return [finished[index] for index in front([one.score for one in finished])]


def _finish(run: Run, content: dict[str, Any], found: _OpenSearch, judged: dict[str, SearchTrial]) -> SearchOutcome:
    """Write the recipes and the page of the front."""
    best = found.front()
    folder = run.folder / FRONT_FOLDER
    folder.mkdir(exist_ok=True)
    wanted = set()
    for one in best:
        recipe = with_overrides(content, one.overrides)
        of_test = ""
        if one.name in judged and judged[one.name].is_finished:
            of_test = f", {judged[one.name].test_ne:.4f} on the test split"
        text = (
            f"Found by a search: NE {one.trial.ne:.4f} on the validation split{of_test}; {one.trial.flops:,} FLOPs an "
            f"example; architecture {one.name}."
        )
        path = folder / f"{one.name}.toml"
        write_atomically(path, recipes.dump(recipe.model_copy(update={"description": text})))
        wanted.add(path.name)
    for path in folder.glob("*.toml"):  # files of an earlier part of the search
        if path.name not in wanted:
            path.unlink()
    out_of_time = not found.is_exhausted and len(found.done) < len(found.proposals) + found.config.trials
    banner = _not_ended(len(found.done)) if out_of_time else ""
    page_of_it = _write_page(run, found.config, content, found.space.size, found.done, best, judged, banner)
    return SearchOutcome(run.folder, found.done, best, page_of_it, judged, found.is_exhausted, out_of_time)


def _not_ended(tried: int) -> str:
    return f"This search has not ended: it runs, or was stopped. Candidates on record: {tried:,}."


def _write_page(
    run: Run,
    config: SearchConfig,
    content: dict[str, Any],
    size: int,
    tried: Sequence[SearchCandidate],
    best: Sequence[SearchCandidate],
    judged: Mapping[str, SearchTrial],
    banner: str = "",
) -> Path:
    trial = config.trial.model_dump(mode="json", exclude_none=True)
    settings = {
        "searcher": config.searcher,
        "goal": config.goal,
        "seed": config.seed,
        "batch": config.batch,
        "combinations in the space": f"{size:,}",
        **{_WORDS[key]: value for key, value in trial.items() if key in _WORDS},
        "new seeds of the front": config.judge,
    }
    entries = [
        {
            **one.trial.to_dict(),
            "name": one.name,
            "number": one.number,
            "origin": one.origin,
            "overrides": one.overrides,
        }
        for one in tried
    ]
    described = f"search by {config.searcher} on {content['data'].get('dataset') or 'own data'}"
    tested = {name: (one.ne, one.test_ne_of_seeds) for name, one in judged.items()}
    names = [one.name for one in best]
    return page.write(run, search_page(run.name, described, entries, names, settings, tested, banner))


def report_search(folder: Path | str) -> Path:
    """Write the page of a search again, from its record in a ``folder``, and return its path.

    Raises:
        RunError: If the folder is that of no search, or of one of another version of this program.
    """
    run = Run(folder, of_search=True)
    saved, recipe = run.read_json(SEARCH_FILE), recipes.load(run.recipe_file)
    try:
        config = SearchConfig.model_validate(saved.get("config"))
        content = recipe.model_dump(mode="json", exclude_none=True)
        size = SearchSpace(SpaceConfig.model_validate(saved.get("space")), content["model"]).size
    except ValidationError as error:
        remedy = "search again in another --run folder"
        raise RunError("is a search of another version of this program", where=str(folder), remedy=remedy) from error
    records: dict[str, list[dict[str, Any]]] = {"candidate": [], "judged": []}
    for entry in run.metrics():
        records.get(entry.get("kind", ""), []).append(entry)
    tried = [
        SearchCandidate(one["number"], one["name"], one["origin"], one["overrides"], SearchTrial.from_dict(one))
        for one in sorted(records["candidate"], key=lambda one: one["number"])
    ]
    best, judged = _front_of(tried), records["judged"]
    seeds = judged[-1]["seeds"] if judged else 0
    by_name = {one["name"]: SearchTrial.from_dict(one) for one in judged if one["seeds"] == seeds}
    found = {one.name: by_name[one.name] for one in best if one.name in by_name}
    config = config.model_copy(update={"judge": seeds})
    status, banner = run.status(), ""
    if status is None or not status.is_complete:
        banner = _not_ended(len(tried))
    return _write_page(run, config, content, size, tried, best, found, banner)


def read_proposals(text: str, where: str) -> list[dict[str, Any]]:
    """Read candidates from outside: one JSON object of recipe keys a line, or an architecture that NASRec published.

    Raises:
        DataError: If a line is not a JSON object, or sets keys of other sections than model, training and tables.
    """
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        content = parse_json(line, place)
        if not isinstance(content, dict) or not content:
            raise DataError("is not a JSON object", where=place, remedy='write {"model": {"name": "graph", ...}}')
        if is_nasrec(content):
            found.append({"model": from_nasrec(content, place).model_dump(mode="json", exclude_none=True)})
            continue
        for key in content:
            if key.partition(".")[0] not in ("model", "training", "tables"):
                raise DataError(f"sets {key!r}, no key of model, training or tables", where=place)
        found.append(content)
    return found
