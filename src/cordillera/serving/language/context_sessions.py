"""Conversations with a language model whose keys and values are distributed over ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cordillera.distributed.context.cache import CacheShape, ContextCache, ContextCacheConfig
from cordillera.distributed.ledger import Ledger
from cordillera.errors import DataError
from cordillera.jagged import offsets_from_lengths
from cordillera.models.language.llama import Llama
from cordillera.serving.language.sampler import Sampling, draw_noise, penalized_rows, sample


class ContextSessions:
    """Several conversations in parallel over the ranks of a group, each with any number of turns.

    Every rank makes the same calls.

    Args:
        model: Whole model, the same on every rank.
        capacity: Number of tokens of the longest conversation; None for the model's context.

    Raises:
        PlanError: If there is no process group, or this process is not in it.
    """

    def __init__(
        self,
        model: Llama,
        config: ContextCacheConfig,
        sequences: int,
        capacity: int | None = None,
        group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.model = model
        weight, shape = model.embedding.weight, model.config
        room = CacheShape(
            layers=shape.layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_width,
            sequences=sequences,
            capacity=shape.context if capacity is None else min(capacity, shape.context),
            dtype=weight.dtype,
            device=weight.device,
        )
        self.cache = ContextCache(config, room, group, ledger)
        self._unread: list[list[int]] = [[] for _ in range(sequences)]  # last tokens of replies, not yet read
        self._tokens: list[list[int]] = [[] for _ in range(sequences)]  # tokens that were read

    @torch.inference_mode()
    def read(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Append ``rows``, token ids for each conversation, possibly none, after the unread rest of the replies.

        Returns:
            Logits after the last token of each conversation with new tokens, ``[n, vocabulary]``, equal on every rank.

        Raises:
            DataError: If rows and conversations differ in number, an id is not a token, no token is given, or a
                conversation would exceed the capacity.
            PlanError: If ranks were given different tokens.
            PeerError: If a rank does not answer in time; the conversations are then unusable.
        """
        self._check(rows)
        added = [[*unread, *row] if row else [] for unread, row in zip(self._unread, rows, strict=True)]
        device = self.model.embedding.weight.device
        tokens = torch.tensor([token for row in added for token in row], dtype=torch.int64, device=device)
        offsets = offsets_from_lengths(torch.tensor([len(row) for row in added]))
        own = self.cache.shard(tokens, offsets)
        hidden = self.model.hidden(own, offsets, cache=self.cache)
        self._unread = [[] if row else unread for unread, row in zip(self._unread, rows, strict=True)]
        for told, row, length in zip(self._tokens, added, self.cache.lengths, strict=True):
            told[length - len(row) :] = row  # what was cut off is forgotten
        return self.model.logits(self.cache.gather_last(hidden))

    def reply(
        self,
        rows: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop: Collection[int] = (),
        sampling: Sampling | None = None,
    ) -> list[list[int]]:
        """Read ``rows`` of tokens, then return a reply of each conversation that got some, until ``stop`` or the limit.

        The last token of a reply is part of the conversation, and is read at the beginning of the next turn.

        Args:
            max_new_tokens: Largest number of new tokens of each conversation.
            sampling: Settings of sampling; None for the defaults of
                :class:`~cordillera.serving.language.sampler.Sampling`. The first rank draws.

        Raises:
            DataError: If the tokens are invalid, as in :meth:`read`, ``max_new_tokens`` is below 1, or logits are not
                finite.
            PlanError: If ranks were given different tokens.
            PeerError: If a rank does not answer in time; the conversations are then unusable.
        """
        if max_new_tokens < 1:
            raise DataError(f"{max_new_tokens} is not a number of tokens", where="max_new_tokens")
        self._check(rows)
        sampling = sampling or Sampling()
        device = self.model.embedding.weight.device
        limits = [min(max_new_tokens, left) for left in self._left(rows)]
        replies: list[list[int]] = [[] for _ in rows]
        while any(rows):
            going = [sequence for sequence, row in enumerate(rows) if row]
            logits = self.read(rows)
            noise = None
            if sampling.temperature > 0:
                count, lengths = logits.shape[1], self.cache.lengths
                noise = torch.stack([draw_noise(sampling.seed + s, lengths[s], count, device) for s in going])
            texts, before = [replies[sequence] for sequence in going], [self._tokens[sequence] for sequence in going]
            drawn = sample(penalized_rows(logits, sampling, texts, before), sampling, noise)
            tokens = self.cache.of_first_rank("drawn tokens", drawn).tolist()
            rows = [[] for _ in rows]
            for sequence, token in zip(going, tokens, strict=True):
                replies[sequence].append(token)
                if token in stop or len(replies[sequence]) == limits[sequence]:
                    self._unread[sequence] = [token]
                else:
                    rows[sequence] = [token]
        return replies

    def _left(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Return the number of tokens that fit into each conversation after its row; silent ones need none."""
        capacity, found = self.cache.shape.capacity, []
        for sequence, row in enumerate(rows):
            left = capacity - self.cache.lengths[sequence] - len(self._unread[sequence]) - len(row)
            if row and left < 1:
                raise DataError(
                    f"with at least one more token, {len(row)} new ones do not fit the capacity of {capacity}",
                    where=f"conversation {sequence}",
                    remedy="begin a new one, or ask for less",
                )
            found.append(left)
        return found

    def _check(self, rows: Sequence[Sequence[int]]) -> None:
        if len(rows) != len(self._unread):
            raise DataError(f"{len(rows)} rows for {len(self._unread)} conversations", where="ContextSessions")
        if not any(rows):
            raise DataError("there is no new token", where="ContextSessions", remedy="give one conversation some")
        last = self.model.config.vocabulary - 1
        for number, row in enumerate(rows):
            for token in row:
                if not 0 <= token <= last:
                    raise DataError(
                        f"{token} is not an id from 0 to {last}",
                        where=f"conversation {number}",
                        remedy="use the tokenizer that belongs to the model",
                    )
