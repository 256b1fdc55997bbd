"""The training loop: interrupted runs equal uninterrupted ones, and bad numbers stop it before they spread."""

import json
import math
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

from cordillera.errors import CheckpointError, CordilleraError, TrainingError
from cordillera.jagged import JaggedBatch
from cordillera.training import checkpoints
from cordillera.training.optimizers import dense_parameters, embedding_tables, schedule
from cordillera.training.ranking.config import STOP_TITLES, Progress, TrainingConfig
from cordillera.training.ranking.scoring import best_checkpoint, load_weights, scorer
from cordillera.training.ranking.tasks.losses import weighted_loss

from .conftest import MemoryLoader

CLOCKS = ("seconds", "examples_per_second", "data_fraction")


def records(run):
    return [{k: v for k, v in record.items() if k not in CLOCKS} for record in run.metrics()]


def assert_same_weights(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.cases(2)
@pytest.mark.parametrize("stop_at", [1, 13, *(pytest.param(step, marks=pytest.mark.slow) for step in (4, 10, 19))])
@pytest.mark.parametrize("model", ["dlrm", "wukong", "hstu"])
def test_a_run_stopped_at_any_step_resumes_to_the_same_bits(make_trainer, stop_at, model):
    options = {"model": model, "progressive": True, "progressive_window": 100, "checkpoint_every": 4, "patience": 9}
    options["decay"] = "plateau"
    whole = make_trainer("whole", **options)
    whole.fit()
    first = make_trainer("parts", **options)
    first.on_step = lambda record, progress, total: first.stop() if progress.step == stop_at else None
    assert first.fit().ended == "interrupted"
    second = make_trainer("parts", **options)
    assert second.resume()
    assert second.progress.step == stop_at
    assert second.fit().ended == "finished"
    assert_same_weights(whole.model, second.model)
    assert records(whole.run) == records(second.run)
    assert whole.run.read_json("progressive.json") == second.run.read_json("progressive.json")


@pytest.mark.parametrize("rows", ["int8", "int4"])
def test_rows_in_few_bits_and_their_cache_resume_to_the_same_bits(make_trainer, rows):
    options = {"tables": {"rows": rows, "cache": 0.4}, "progressive": True, "checkpoint_every": 4, "patience": 9}
    whole = make_trainer("whole", **options)
    whole.fit()
    assert whole.model.tables.cache.statistics()["hits"] > 0
    first = make_trainer("parts", **options)
    first.on_step = lambda record, progress, total: first.stop() if progress.step == 7 else None
    assert first.fit().ended == "interrupted"
    second = make_trainer("parts", **options)
    assert second.resume()
    second.fit()
    assert_same_weights(whole.model, second.model)
    assert records(whole.run) == records(second.run)


def test_a_run_that_died_between_checkpoints_repeats_the_lost_steps_exactly(make_trainer):
    whole = make_trainer("whole", checkpoint_every=4)
    whole.fit()
    first = make_trainer("parts", checkpoint_every=4)

    class Died(Exception):
        pass

    def die(record, progress, total):
        if progress.step == 15:
            raise Died

    first.on_step = die
    with pytest.raises(Died):
        first.fit()
    second = make_trainer("parts", checkpoint_every=4)
    second.resume()
    assert second.progress.step == 12
    second.fit()
    assert_same_weights(whole.model, second.model)
    assert records(whole.run) == records(second.run)


def test_resuming_before_the_first_checkpoint_starts_from_the_beginning(make_trainer):
    trainer = make_trainer("parts")
    trainer.run.log({"kind": "train", "step": 3})
    assert not trainer.resume()
    assert trainer.run.metrics() == []


@pytest.mark.parametrize("probe_every", [0, 3])
def test_resuming_a_finished_run_changes_nothing(make_trainer, probe_every):
    first = make_trainer(probe_every=probe_every)
    first.fit()
    before = records(first.run)
    second = make_trainer(probe_every=probe_every)
    second.resume()
    assert second.fit().ended == "finished"
    assert_same_weights(first.model, second.model)
    assert records(second.run) == before


@pytest.mark.parametrize(
    "settings",
    [{"betas": (2, 2)}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"learning_rate": math.inf}, {"eps": math.nan}],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        TrainingConfig(**settings)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_returns_and_handlers_are_put_back(make_trainer, number):
    before = signal.signal(number, signal.default_int_handler)  # under nohup a hangup is ignored, as it should be
    try:
        trainer = make_trainer(batches=10)
        trainer.on_step = lambda record, progress, total: os.kill(os.getpid(), number) if progress.step == 5 else None
        assert trainer.fit().ended == "interrupted"
        assert checkpoints.steps(trainer.run.checkpoints) == [6] or checkpoints.steps(trainer.run.checkpoints) == [5]
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_training_works_outside_the_main_thread(make_trainer):
    trainer = make_trainer()
    ended = []
    thread = threading.Thread(target=lambda: ended.append(trainer.fit().ended))
    thread.start()
    thread.join(60)
    assert ended == ["finished"]


def test_a_run_whose_last_epochs_do_not_improve_has_finished(make_trainer):
    trainer = make_trainer(epochs=3, patience=2, learning_rate=1e-30, tables={"learning_rate": 1e-30})
    assert trainer.fit().ended == "finished"
    assert trainer.progress.stale == 2
    assert trainer.fit().ended == "finished"


def test_early_stopping_keeps_the_best_weights_and_their_checkpoint(make_trainer):
    trainer = make_trainer(epochs=30, patience=2, learning_rate=0.05)
    report = trainer.fit()
    assert report.ended == "early"
    evaluations = [r for r in trainer.run.metrics() if r["kind"] == "evaluation"]
    means = [sum(t["ne"] for t in r["tasks"].values()) / 2 for r in evaluations]
    best = min(range(len(means)), key=means.__getitem__)
    assert len(means) == best + 3
    assert report.progress.best_step == evaluations[best]["step"]
    kept = best_checkpoint(trainer.run, use_best=True)
    assert kept.step == evaluations[best]["step"]
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, kept.tensors[f"model.{name}"]), name


@pytest.mark.cases(2)
@pytest.mark.parametrize("metric", ["log_loss", "auc", "gauc", "ndcg", "recall", "mrr"])
def test_weights_are_kept_by_the_metric_of_choice_and_a_resumed_run_keeps_the_same(make_trainer, metric):
    options = {"epochs": 12, "patience": 2, "learning_rate": 0.05, "stop_on": metric, "ranking_k": 3}
    options["tables"] = {"l2": 0.1}
    whole = make_trainer("whole", **options)
    report = whole.fit()
    assert report.ended == "early"
    evaluations = [r for r in whole.run.metrics() if r["kind"] == "evaluation"]
    means = [sum(t[metric] for t in r["tasks"].values()) / 2 for r in evaluations]
    best = means.index(min(means) if metric == "log_loss" else max(means))
    assert len(means) == best + 3
    assert (report.progress.best, report.progress.best_step) == (means[best], evaluations[best]["step"])
    assert best_checkpoint(whole.run, use_best=True).step == evaluations[best]["step"]
    first = make_trainer("parts", **options)
    stop_at = evaluations[best]["step"] + 3
    first.on_step = lambda record, progress, total: first.stop() if progress.step == stop_at else None
    assert first.fit().ended == "interrupted"
    second = make_trainer("parts", **options)
    assert second.resume()
    assert second.progress.best_text == f"best {STOP_TITLES[metric]} {means[best]:.4f}"
    assert second.fit().ended == "early"
    assert_same_weights(whole.model, second.model)
    assert records(whole.run) == records(second.run)


@pytest.mark.parametrize(("metric", "lower"), [("ne", True), ("log_loss", True), ("auc", False), ("mrr", False)])
def test_only_finite_values_that_are_better_are_the_best(metric, lower):
    progress = Progress(metric=metric)
    assert progress.best_text == ""
    seen = [math.nan, math.inf, 0.5, 0.5, 0.4, 0.6, -math.inf, math.inf, math.nan]
    for progress.step, mean in enumerate(seen):
        progress.note(mean)
    assert (progress.best, progress.best_step, progress.stale) == ((0.4, 4, 4) if lower else (0.6, 5, 3))
    assert Progress.from_state(progress.to_state()) == progress


def test_checkpoints_from_before_the_choice_are_of_ne(make_trainer):
    trainer = make_trainer(batches=4, epochs=1)
    trainer.fit()
    saved = checkpoints.load(checkpoints.folder_of(trainer.run.checkpoints, 4))
    assert saved.state.pop("metric") == "ne"
    trainer.restore(saved)
    assert (trainer.progress.metric, trainer.progress.best_step) == ("ne", 4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_training_before_it_reaches_the_weights(make_trainer, value):
    loader = MemoryLoader(10)

    def spoil(number, batch):
        if number == 6:
            batch.dense[3, 0] = value
        return batch

    loader.spoil = spoil
    trainer = make_trainer(loader=loader, checkpoint_every=2)
    with pytest.raises(TrainingError, match=r"step 7 .*epoch 1"):
        trainer.fit()
    for name, tensor in trainer.model.state_dict().items():
        assert torch.isfinite(tensor).all(), name
    assert checkpoints.steps(trainer.run.checkpoints)[-1] == 6


def test_undefined_ne_is_an_error_where_a_decision_needs_it_and_null_elsewhere(make_trainer):
    def one_class(number, batch):
        batch.labels[:, 0] = 1
        return batch

    for place, options in enumerate(({}, {"patience": 2}, {"decay": "plateau"})):
        trainer = make_trainer(f"run{place}", **options)
        trainer.validation.spoil = one_class
        if not options:
            trainer.fit()
            evaluation = [r for r in trainer.run.metrics() if r["kind"] == "evaluation"][-1]
            assert evaluation["tasks"]["click"]["ne"] is None
            assert evaluation["tasks"]["buy"]["ne"] is not None
        else:
            with pytest.raises(TrainingError, match=r"undefined for \['click'\]") as error:
                trainer.fit()
            assert "more rows, as by data.fractions = [0.7, 0.2, 0.1] or data.split = 'random'" in error.value.remedy


def test_a_metric_of_groups_that_is_undefined_is_an_error_that_says_why(make_trainer):
    def without_groups(number, batch):
        return replace(batch, groups=None)

    def without_positives(number, batch):
        batch.labels[:, 1] = 0
        return batch

    cases = [
        ("gauc", without_groups, r"GAUC is undefined for \['click', 'buy'\]: no groups"),
        ("mrr", without_groups, r"MRR is undefined for \['click', 'buy'\]: no groups"),
        ("ndcg", without_positives, r"NDCG is undefined for \['buy'\]: no group with a positive label"),
    ]
    for place, (metric, spoil, message) in enumerate(cases):
        trainer = make_trainer(f"run{place}", patience=2, stop_on=metric)
        trainer.validation.spoil = spoil
        with pytest.raises(TrainingError, match=message):
            trainer.fit()


def test_gradient_clipping_bounds_the_norm_of_the_dense_gradients(make_trainer):
    trainer = make_trainer(gradient_clip=1e-3, batches=3, epochs=1, log_every=1)
    seen = []
    step = trainer.optimizer.step

    def spy():
        seen.append(
            float(torch.nn.utils.get_total_norm([p.grad for p in trainer.dense.values() if p.grad is not None]))
        )
        step()

    trainer.optimizer.step = spy
    trainer.fit()
    assert max(seen) <= 1e-3 * (1 + 1e-4)
    logged = [r["gradient_norm"] for r in trainer.run.metrics() if r["kind"] == "train"]
    assert min(logged) > 1e-3


def test_a_sample_of_weight_zero_teaches_nothing(make_trainer):
    class Weighted(MemoryLoader):
        def __init__(self, junk):
            super().__init__(5, weights=True)
            self.junk = junk

        def epoch(self, epoch=0, start=0):
            for batch in super().epoch(epoch, start):
                batch.weights[:10] = 0.0
                batch.labels[:10] = self.junk
                yield batch

    trained = []
    for junk in (0.0, 1.0):
        trainer = make_trainer(f"junk{junk}", loader=Weighted(junk), epochs=1)
        trainer.fit()
        trained.append(trainer.model)
    assert_same_weights(*trained)


def test_the_weighted_loss_is_its_definition():
    logits, labels = torch.randn(8, 2, dtype=torch.float64), (torch.rand(8, 2) < 0.5).double()
    weights, tasks = torch.rand(8, dtype=torch.float64), torch.tensor([1.0, 3.0], dtype=torch.float64)
    p = logits.sigmoid()
    each = -(labels * p.log() + (1 - labels) * (1 - p).log())
    expected = (weights * (each * tasks).sum(1)).sum() / weights.sum()
    loss, total = weighted_loss(logits, labels.float(), weights.float(), tasks.float())
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert total == pytest.approx(float(weights.sum()), rel=1e-6)
    assert float(weighted_loss(logits, labels.float(), torch.zeros(8), None)[0]) == 0.0


def test_bf16_computes_in_bfloat16_over_float32_master_weights(make_trainer):
    trainer = make_trainer(precision="bf16", epochs=1)
    kinds = []
    trainer.model.heads.register_forward_pre_hook(lambda module, inputs: kinds.append(inputs[0].dtype))
    trainer.fit()
    assert set(kinds) == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert {v.dtype for s in trainer.optimizer.state.values() for k, v in s.items() if k != "step"} == {torch.float32}


def test_tables_are_never_in_the_dense_optimizer(make_trainer):
    trainer = make_trainer()
    owned = {id(t.weight) for t in embedding_tables(trainer.model).values()}
    assert owned
    assert not owned & {id(p) for p in dense_parameters(trainer.model).values()}
    assert not owned & {id(p) for g in trainer.optimizer.param_groups for p in g["params"]}


def test_weights_of_another_model_are_refused(make_trainer):
    trainer = make_trainer(epochs=1, batches=2)
    trainer.fit()
    other = make_trainer("other", model="wukong")
    with pytest.raises(CheckpointError, match="another model"):
        load_weights(other.model, best_checkpoint(trainer.run, use_best=False))


def test_scoring_needs_no_labels_and_leaves_the_mode_alone(make_trainer):
    trainer = make_trainer()
    batch = next(iter(MemoryLoader(1).epoch()))
    score = scorer(trainer.model, torch.device("cpu"), "fp32")
    trainer.model.train()
    first = score(batch)
    assert trainer.model.training
    assert torch.equal(first, score(batch))
    assert first.shape == (64, 2)


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
def test_the_schedule_rises_to_one_and_never_leaves_zero_to_one(decay):
    factors = [schedule(s, 100, warmup=10, decay=decay, floor=0.1) for s in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == pytest.approx(1.0)
    assert all(0 < f <= 1 for f in factors)
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    if decay != "none":
        assert schedule(100, 100, warmup=10, decay=decay, floor=0.1) == pytest.approx(0.1)


def test_unknown_task_weights_are_refused(make_trainer):
    with pytest.raises(TrainingError, match="names no task"):
        make_trainer(task_weights={"clik": 2.0})


def test_max_steps_ends_training_in_the_middle_of_an_epoch(make_trainer):
    trainer = make_trainer(max_steps=7)
    assert trainer.fit().progress.step == 7


def test_a_batch_with_an_id_out_of_range_is_named(make_trainer):
    loader = MemoryLoader(2)

    def spoil(number, batch):
        batch.sparse.values[5] = 50
        return batch

    loader.spoil = spoil
    with pytest.raises(Exception, match="id"):
        make_trainer(loader=loader).fit()


def test_config_defaults_train(make_trainer):
    assert TrainingConfig().epochs == 1
    assert isinstance(next(iter(MemoryLoader(1).epoch())).sparse, JaggedBatch)


def test_the_logged_gradient_norm_is_that_of_the_logged_step(make_trainer):
    found = []
    for clip in (None, 1e9):  # a bound that is never reached, for which the norm of every step is known
        trainer = make_trainer(f"clip {clip}", batches=4, epochs=1, log_every=3, gradient_clip=clip)
        trainer.fit()
        found.append([(r["step"], r["gradient_norm"]) for r in trainer.run.metrics() if r["kind"] == "train"])
    assert found[0][0][0] == 3
    assert found[0][0] == found[1][0]
    assert found[0][0][1] > 0


def test_rates_are_cut_on_plateaus_as_by_torch(make_trainer):
    options = {"epochs": 8, "log_every": 1, "learning_rate": 0.03, "evaluate_every": 3, "stop_on": "auc"}
    trainer = make_trainer(decay="plateau", final_rate=0.005, **options)
    trainer.fit()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.03)
    cuts = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.1, 0, threshold=0, min_lr=0.03 * 0.005)
    rates = []
    for record in trainer.run.metrics():
        if record["kind"] == "train":
            rates.append(optimizer.param_groups[0]["lr"])
            assert record["learning_rate"] == pytest.approx(rates[-1]), record["step"]
        elif record["kind"] == "evaluation":
            cuts.step(sum(task["auc"] for task in record["tasks"].values()) / len(record["tasks"]))
    assert len({*rates}) == 4  # as at first, cut once, cut twice, and the least


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_schedule_is_torchs(decay):
    warmup, total, floor = 4, 17, 0.1
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = torch.optim.lr_scheduler
    falling = (
        rates.LinearLR(optimizer, 1.0, floor, total - warmup)
        if decay == "linear"
        else rates.CosineAnnealingLR(optimizer, total - warmup, floor)
    )
    for step in range(warmup, total + 1):
        assert schedule(step, total, warmup=warmup, decay=decay, floor=floor) == pytest.approx(
            optimizer.param_groups[0]["lr"]
        )
        optimizer.step()
        falling.step()
    assert schedule(total + 5, total, warmup=warmup, decay=decay, floor=floor) == pytest.approx(floor)
    for end in range(warmup + 1, warmup + 4):  # however short the decay is
        assert schedule(end, end, warmup=warmup, decay=decay, floor=floor) == pytest.approx(floor)
    assert [schedule(step, total, warmup=warmup, decay="none") for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


def test_progressive_metrics_of_data_without_groups_are_saved_and_resumed(make_trainer):
    def trainer_of(name):
        loader = MemoryLoader(10)
        loader.spoil = lambda number, batch: replace(batch, groups=None)
        return make_trainer(name, loader=loader, progressive=True, progressive_window=100, checkpoint_every=4)

    whole = trainer_of("whole")
    whole.fit()
    first = trainer_of("parts")
    first.on_step = lambda record, progress, total: first.stop() if progress.step == 7 else None
    first.fit()
    second = trainer_of("parts")
    assert second.resume()
    second.fit()
    assert json.dumps(records(whole.run)) == json.dumps(records(second.run))  # NaN differs from itself
    texts = [json.dumps(run.read_json("progressive.json")) for run in (whole.run, second.run)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda batch: replace(batch, labels=batch.labels[:, :1]),
            r"labels of .* must be \[64, 2\], got \[64, 1\]",
        ),
        (lambda batch: replace(batch, labels=batch.labels[:, 0]), r"labels of .* must be \[64, 2\], got \[64\]"),
        (lambda batch: replace(batch, weights=torch.ones(64, 1)), r"weights must be \[64\], got \[64, 1\]"),
        (lambda batch: replace(batch, dense=batch.dense[:0]), "the batch has no samples"),
        (
            lambda batch: replace(batch, dense=torch.where(torch.arange(2) == 1, math.nan, batch.dense)),
            r"the loss became nan at step 1 \(epoch 1\), as dense value 1 of sample 0 of the batch is nan",
        ),
    ],
)
def test_a_batch_of_other_shapes_is_refused(make_trainer, spoil, said):
    loader = MemoryLoader(2)
    loader.spoil = lambda number, batch: spoil(batch)
    with pytest.raises(CordilleraError, match=said):
        make_trainer(loader=loader).fit()
