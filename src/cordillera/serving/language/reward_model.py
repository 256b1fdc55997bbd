"""Scores of answers by a reward model.

Source: Grattafiori et al. 2024, section 4.1.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cordillera.data.language.chats.tokens import chat_tokenizer, tokenise_chat
from cordillera.data.tokenizers.chat import Message
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.errors import DataError
from cordillera.jagged import offsets_from_lengths
from cordillera.models.language.checkpoints import open_checkpoint, read_model
from cordillera.serving.language.language_model import find_model, tokenizer_of
from cordillera.training.language.objectives import last_rows

_TOKENS = 4096  # most tokens of chats that are scored together


class RewardModel:
    """A reward model with its tokenizer, in 32 bits.

    Args:
        name: Folder of a run whose objective is ``reward``, or of one of its checkpoints.
        device: Device that computes.

    Raises:
        DataError: If it is no reward model, or there is no tokenizer.
        CheckpointError: If the checkpoint is missing or damaged.
    """

    def __init__(self, name: str | Path, device: torch.device | str = "cpu") -> None:
        path = find_model(name)
        source = open_checkpoint(path)
        if not source.config.scores:
            raise DataError(
                "is no reward model", where=str(name), remedy="train a recipe with objective.name = 'reward'"
            )
        self.tokenizer = chat_tokenizer(load_tokenizer(tokenizer_of(name, path)))
        self.model = read_model(source, torch.float32, device).eval()
        self.device = device

    @torch.inference_mode()
    def score(self, chats: Sequence[Sequence[Message]]) -> list[float]:
        """Return a score of each chat, which ends with the answer that is scored; only differences have a meaning.

        Raises:
            DataError: If a chat has no answer or is longer than the context, or a score is not finite.
        """
        rows = [tokenise_chat(self.tokenizer, chat, where=f"chat {place}") for place, chat in enumerate(chats)]
        found: list[float] = []
        while len(found) < len(rows):
            taken = rows[len(found) : len(found) + 1]
            while len(found) + len(taken) < len(rows):
                more = rows[len(found) + len(taken)]
                if sum(len(one.tokens) for one in taken) + len(more.tokens) > _TOKENS:
                    break
                taken.append(more)
            found += self._score([one.tokens.tolist() for one in taken], len(found))
        return found

    def _score(self, rows: Sequence[Sequence[int]], first: int) -> list[float]:
        for place, row in enumerate(rows, first):
            if len(row) > self.model.config.context:
                raise DataError(
                    f"has {len(row):,} tokens, the context is {self.model.config.context:,}", where=f"chat {place}"
                )
        tokens = torch.tensor([token for row in rows for token in row], device=self.device)
        offsets = offsets_from_lengths(torch.tensor([len(row) for row in rows]))
        scores = self.model.logits(last_rows(self.model.hidden(tokens, offsets), offsets)).squeeze(1)
        if not bool(scores.isfinite().all()):
            raise DataError("a score is not finite", where="reward model", remedy="train it again with a lower rate")
        return scores.tolist()
