"""Generation over the processes of a pipeline, each of which holds some of the layers.

A pass goes through the stages one after the other, so that one batch alone keeps one process busy at a time. Texts are
therefore divided into microbatches: while a stage computes one, the others compute other ones. There is no flush at the
end of a pass, as in training: a microbatch begins its next pass when its tokens are drawn.

Source: Grattafiori et al. 2024, section 6.1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from cordillera.errors import DataError, PeerError, PlanError
from cordillera.jagged import offsets_from_lengths
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Llama
from cordillera.models.language.rope import rope_table
from cordillera.models.language.stages import cut_layers
from cordillera.serving.language.engine import check_prompt
from cordillera.serving.language.prefixes import next_part
from cordillera.serving.language.sampler import Sampling, draw_noise, penalized_rows, sample

_IN_FLIGHT = 4  # unconfirmed messages to a stage
_HIDDEN, _TOKENS = 1, 2  # tags


@dataclass
class _Microbatch:
    """Texts that go through the stages together.

    Attributes:
        numbers: Number of each text.
        going: Which of them are not yet ended.
        drawn: Tokens that the last stage drew for those that go on, on the last stage alone.
    """

    numbers: list[int]
    cache: KVCache
    going: list[bool]
    drawn: list[int]


class PipelineDecoder:
    """A model whose layers are divided among the ranks of a group, which write texts together.

    Every rank makes the same calls.

    Args:
        model: Whole model, the same on every rank; a rank computes with its own layers alone.
        microbatches: Number of parts into which texts are divided. At least as many as ranks keep all of them busy.
        group: Ranks, in the order of their layers; None for all.
        timeout: Seconds to wait for another rank.

    Raises:
        PlanError: If there is no process group, this process is not in it, the model has fewer layers than it has
            ranks, or the model has experts.
    """

    def __init__(
        self, model: Llama, microbatches: int = 2, group: dist.ProcessGroup | None = None, timeout: float = 60.0
    ) -> None:
        if not dist.is_initialized():
            raise PlanError("there is no process group", where="PipelineDecoder", remedy="start the ranks first")
        self.group, self.timeout, self.model = group, timedelta(seconds=timeout), model
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise PlanError("this process is not in the group", where="PipelineDecoder")
        if not 1 <= self.size <= model.config.layers:
            raise PlanError(f"{self.size} ranks for {model.config.layers} layers", where="PipelineDecoder")
        if model.config.experts is not None:
            raise PlanError("experts are not divided among stages", where="PipelineDecoder", remedy="use one process")
        if microbatches < 1:
            raise DataError(f"{microbatches} is not a number of microbatches", where="microbatches")
        self.microbatches = microbatches
        self._layers = cut_layers(model.config.layers, self.size)[self.rank]
        self._is_first, self._is_last = self.rank == 0, self.rank == self.size - 1
        self._sent: deque[tuple[dist.Work, int, Tensor]] = deque()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop: Collection[int] = (),
        sampling: Sampling | None = None,
    ) -> list[list[int]]:
        """Continue prompts until a stop token, ``max_new_tokens`` or the end of the context; return the new tokens.

        The texts are those of :func:`~cordillera.serving.language.generation.generate`, on every rank.

        Args:
            prompts: Token ids, one list per prompt.
            max_new_tokens: Largest number of new tokens of each prompt.
            stop: Ids of tokens that end a text, which are part of it.
            sampling: Settings of sampling; None for the defaults. Text ``i`` draws with ``seed + i``.

        Raises:
            DataError: If a prompt is invalid, or logits are not finite (on the last rank).
            PeerError: If a rank does not answer in time.
        """
        for number, prompt in enumerate(prompts, 1):
            check_prompt(self.model.config, prompt, max_new_tokens, f"prompt {number}")
        self._prompts, self._stop, self._sampling = prompts, frozenset(stop), sampling or Sampling()
        context = self.model.config.context
        self._limits = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
        self._texts: list[list[int]] = [[] for _ in prompts]
        batches = [self._make(range(first, len(prompts), self.microbatches)) for first in range(self.microbatches)]
        with torch.inference_mode():
            for batch in batches:
                self._read(batch)
            while any(any(batch.going) for batch in batches):
                for batch in batches:
                    if any(batch.going):
                        self._book(batch, self._hear(batch))
                    if any(batch.going):
                        self._tell(batch, self._step(batch))
        while self._sent:
            self._finish_send()
        return self._texts

    def _make(self, numbers: range) -> _Microbatch:
        weight, own = self.model.embedding.weight, list(numbers)
        capacity = max((len(self._prompts[number]) + self._limits[number] for number in own), default=1)
        config = self.model.config.model_copy(update={"layers": len(self._layers)})
        cache = KVCache(config, len(own), capacity, weight.dtype, weight.device)
        return _Microbatch(own, cache, [True] * len(own), [])

    def _read(self, batch: _Microbatch) -> None:
        """Read the prompts of a microbatch one by one, in parts that depend on the prompt alone."""
        drawn = []
        for place, number in enumerate(batch.numbers):
            unread, hidden = list(self._prompts[number]), None
            while unread:
                count = next_part(self.model, len(unread))
                rows: list[list[int]] = [[] for _ in batch.numbers]
                rows[place], unread = unread[:count], unread[count:]
                hidden = self._forward(batch, rows)
            if hidden is not None:
                drawn += self._draw(batch, hidden[-1:], [place])
        if batch.numbers:
            self._tell(batch, drawn)

    def _step(self, batch: _Microbatch) -> list[int]:
        """Run a pass over the unfinished texts of a microbatch; the last stage returns the tokens that it drew."""
        rows = [
            self._texts[number][-1:] if going else [] for number, going in zip(batch.numbers, batch.going, strict=True)
        ]
        hidden = self._forward(batch, rows)
        places = [place for place, going in enumerate(batch.going) if going]
        return [] if hidden is None else self._draw(batch, hidden, places)

    def _forward(self, batch: _Microbatch, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Compute this stage's layers for new tokens; pass the result on, or return it from the last stage."""
        model, device = self.model, self.model.embedding.weight.device
        offsets = offsets_from_lengths(torch.tensor([len(row) for row in rows]))
        step = batch.cache.extend(offsets)
        table = rope_table(model.config, step.positions)
        tokens = [token for row in rows for token in row]
        if self._is_first:
            x = model.embedding(torch.tensor(tokens, device=device))
        else:
            x = torch.empty(len(tokens), model.config.hidden, dtype=model.embedding.weight.dtype, device=device)
            self._receive(x, self.rank - 1, _HIDDEN, "its layers' output")
        x = model.go_through(self._layers, x, offsets, table, step)
        step.commit()
        if self._is_last:
            return x
        self._send(x, self.rank + 1, _HIDDEN)
        return None

    def _draw(self, batch: _Microbatch, hidden: Tensor, places: Sequence[int]) -> list[int]:
        """Draw the token that follows each of some texts, whose last rows are ``hidden [n, hidden]``."""
        logits, noise = self.model.logits(self.model.norm(hidden)), None
        if self._sampling.temperature > 0:
            noise = torch.stack(
                [
                    draw_noise(
                        self._sampling.seed + batch.numbers[place],
                        batch.cache.lengths[place],
                        logits.shape[1],
                        logits.device,
                    )
                    for place in places
                ]
            )
        numbers = [batch.numbers[place] for place in places]
        texts, prompts = [self._texts[number] for number in numbers], [self._prompts[number] for number in numbers]
        return sample(penalized_rows(logits, self._sampling, texts, prompts), self._sampling, noise).tolist()

    def _book(self, batch: _Microbatch, tokens: Sequence[int]) -> None:
        """Take note of the tokens that were drawn for the texts that go on."""
        places = [place for place, going in enumerate(batch.going) if going]
        for place, token in zip(places, tokens, strict=True):
            number = batch.numbers[place]
            self._texts[number].append(token)
            batch.going[place] = token not in self._stop and len(self._texts[number]) < self._limits[number]

    def _tell(self, batch: _Microbatch, tokens: list[int]) -> None:
        """On the last stage, send drawn tokens to all others."""
        if self._is_last:
            batch.drawn = tokens
            for rank in range(self.size - 1):
                self._send(torch.tensor(tokens), rank, _TOKENS)

    def _hear(self, batch: _Microbatch) -> list[int]:
        """Return the tokens that were drawn last for a microbatch."""
        if self._is_last:
            return batch.drawn
        tokens = torch.empty(sum(batch.going), dtype=torch.int64)
        self._receive(tokens, self.size - 1, _TOKENS, "the tokens that it draws")
        return tokens.tolist()

    def _send(self, content: Tensor, rank: int, tag: int) -> None:
        with self._naming(rank, "takes no message"):
            work = dist.isend(content, group=self.group, tag=tag, group_dst=rank)
        assert work is not None
        self._sent.append((work, rank, content))  # the content must stay until it has been sent
        while len(self._sent) > _IN_FLIGHT * self.size:
            self._finish_send()

    def _finish_send(self) -> None:
        work, rank, _ = self._sent.popleft()
        self._wait(work, rank, "has not taken a message")

    def _receive(self, content: Tensor, rank: int, tag: int, what: str) -> None:
        with self._naming(rank, f"has not sent {what}"):
            work = dist.irecv(content, group=self.group, tag=tag, group_src=rank)
        assert work is not None
        self._wait(work, rank, f"has not sent {what}")

    def _wait(self, work: dist.Work, rank: int, what: str) -> None:
        with self._naming(rank, what):
            if not work.wait(self.timeout):
                raise PeerError(f"rank {rank} {what} in {self.timeout}", peer=rank, where=f"rank {self.rank}")

    @contextmanager
    def _naming(self, rank: int, what: str) -> Iterator[None]:
        """Name the rank that an error of the process group is of, be it raised by a message's start or its end."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"rank {rank} {what}: {str(error).splitlines()[0]}",
                peer=rank,
                where=f"rank {self.rank}",
                remedy="see why it ended, and begin again",
            ) from error
