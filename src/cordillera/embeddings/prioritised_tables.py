"""Sharded tables whose exchanges run behind computation, without a change of any bit: prioritised exchange.

Of the rows that the next batch looks up, only those that the present batch looks up as well, on any rank, have to wait
for its update. All others are sent while the backward pass runs. In turn, only gradients of rows that both batches look
up are sent at once; the others travel while the next forward pass runs. Every row is still read after all updates that
precede its batch and updated once per step with its whole gradient, so that results are those of
:class:`~cordillera.embeddings.sharded_tables.ShardedEmbeddingTables`, bit for bit.

Where most rows are in both batches, there is nothing to send early, and the plain exchange has fewer messages. Ranks
therefore count these rows and take the exchange that suits the share, all of them from the same step on.

Source: FreeScale (arXiv 2604.24073) for the two classes of rows; which exchange runs behind which computation, and when
the plain one is taken, are choices of this library.

In steps of several slices, no row changes between two slices: :class:`FrozenWindowTables` fetch the rows of the next
slice and send the gradients of the one before while a slice is computed, without a comparison of ids.

Source of frozen windows: NestPipe (arXiv 2604.06956).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cordillera.distributed.codecs.coders import Coder
from cordillera.distributed.collectives import Arrival
from cordillera.embeddings.exchange import Chosen, Comparing, RowRequest, RowsInTransit
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables, Waiting
from cordillera.errors import PlanError, TrainingError
from cordillera.jagged import JaggedBatch


class _Late(NamedTuple):
    """Gradients that no row of the next batch needs, with the step and the rate of their update.

    They are sent only after the ids of the batch after the next, which must not wait behind them: ``arrival`` is None
    before that.
    """

    request: RowRequest
    gradient: Tensor
    chosen: Chosen
    step: int
    rate: float
    arrival: Arrival[list[Tensor]] | None = None


class _Early(NamedTuple):
    """Rows of the next batch in transit.

    Attributes:
        present: Request of the batch before.
        request: Request of the next batch.
        collisions: Its rows that both look up.
        arrival: All other rows.
        late: Rows that both look up, after their update; None before it.
    """

    present: RowRequest
    request: RowRequest
    collisions: Chosen
    arrival: RowsInTransit
    late: RowsInTransit | None


class PrioritisedEmbeddingTables(ShardedEmbeddingTables):
    """:class:`ShardedEmbeddingTables` that exchange rows and gradients behind computation where nothing changes.

    A step is ``prefetch`` of the batch after the next, the forward pass, :meth:`advance`, the backward pass and
    ``update``, on all ranks alike; a step that leaves out one of them is right as well, but its exchanges are not
    hidden. Arguments are those of :class:`ShardedEmbeddingTables`.

    Attributes:
        collisions: Rows that this rank asked for in the last batch that was compared with the one before, and those of
            them that some rank looked up in both.
        is_prioritised: Whether the next step is prioritised, rather than plain; equal on all ranks.
        leave_at: Share of rows in both batches, over all ranks, above which steps become plain.
        return_at: Share below which they become prioritised again.
        look_every: Number of plain steps after which rows in both batches are counted again.

    Raises:
        PlanError: If the placement has copies of a part, asks for sums of bags, or does not fit the tables or the
            ranks.
    """

    collisions: tuple[int, int] = (0, 0)
    is_prioritised = True
    leave_at, return_at, look_every = 0.8, 0.7, 16

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if any(len(part.ranks) > 1 for part in self.placement.parts):
            raise PlanError("prioritised exchange knows no copies of parts", where="parallel.exchange")
        if self.placement.pooled:
            raise PlanError(
                "prioritised exchange sends rows, as it delays some of them; the placement asks for sums of bags",
                where="parallel.exchange",
                remedy="set parallel.pool = 'rows', or parallel.exchange = 'plain'",
            )
        self._present: RowRequest | None = None
        self._comparing: tuple[RowRequest, RowRequest, Comparing] | None = None
        self._urgent: Chosen | None = None
        self._early: _Early | None = None
        self._late: _Late | None = None
        self._counted = (0, 0)  # served rows of the batch compared last, and rows in both batches; sent once
        self._plain_steps = 0

    def forward(self, sparse: JaggedBatch) -> Tensor:
        """Look up and pool every feature of this rank's samples; see :meth:`EmbeddingTables.forward`."""
        output = super().forward(sparse)
        if torch.is_grad_enabled():
            if self._asked and self._present is not None:
                self._compare(self._present, self._asked[0].request)
            self._send_late()
        return output

    def _compare(self, present: RowRequest, coming: RowRequest) -> None:
        """Compare the present batch with the coming one, if the step is prioritised, or count their common rows."""
        if self.is_prioritised:
            coming.wait()
            comparing = self._exchange.compare(present, coming)
            self._comparing, common = (present, coming, comparing), comparing.later
        else:
            self._plain_steps += 1
            if self._plain_steps % self.look_every:
                return
            coming.wait()
            common = self._exchange.common(present, coming)[1]
        self._counted = (sum(map(len, common)), sum(int(mask.sum()) for mask in common))

    def _take_notes(self) -> tuple[int, ...]:
        notes, self._counted = self._counted, (0, 0)
        return notes

    def _choose(self, rows: int, common: int) -> None:
        """Choose the exchange of the next step by the numbers of rows of all ranks; keep it if none were counted."""
        if rows and (common > self.leave_at * rows if self.is_prioritised else common < self.return_at * rows):
            self.is_prioritised, self._plain_steps = not self.is_prioritised, 0

    def _fetch(self, request: RowRequest, coder: Coder | None) -> Tensor:
        request.wait()
        self._choose(*request.notes)
        self._present = request
        early = self._early
        if early is None or early.request is not request:
            self._settle()
            return super()._fetch(request, coder)
        self._early = None
        found = torch.empty(len(request.distinct), self.embedding_dim)
        self._exchange.place_rows(request, early.arrival.wait(), found, early.collisions.others())
        late = early.late or self._exchange.send_rows(request, self._rows_by_id, early.collisions, self.coder)
        self._exchange.place_rows(request, late.wait(), found, early.collisions)
        return found

    def advance(self) -> None:
        """Send the rows of the next batch that the present one does not change, and ids of batches after it."""
        super().advance()
        if self._comparing is None:
            return
        present, coming, comparing = self._comparing
        self._comparing = None
        self._settle()
        urgent, collisions = comparing.wait()
        self.collisions = (sum(map(len, collisions.asked)), int(sum(int(mask.sum()) for mask in collisions.asked)))
        if self._waiting or self._early is not None:  # an update will change rows of batches other than the current one
            return
        self._urgent = urgent
        arrival = self._exchange.send_rows(coming, self._rows_by_id, collisions.others(), self.coder)
        self._early = _Early(present, coming, collisions, arrival, None)

    def update(self, learning_rate_scale: float = 1.0) -> None:
        """Apply pending gradients of all ranks, once per distinct row: now, or before the row is read again."""
        early, urgent = self._early, self._urgent
        self._urgent = None
        is_alone = len(self._waiting) == 1 and early is not None and self._waiting[0].asked.request is early.present
        if early is None or urgent is None or not is_alone:
            self._settle()
            super().update(learning_rate_scale)
            return
        (one,) = self._waiting
        self._waiting = []
        self.step += 1
        rate, request, gradient = self.config.learning_rate * learning_rate_scale, early.present, self._summed(one)
        received = self._exchange.send_gradients(request, gradient, urgent).wait()
        self._apply_gathered(self._by_part([(request, received, urgent)]), self.step, rate)
        late_rows = self._exchange.send_rows(early.request, self._rows_by_id, early.collisions, self.coder)
        self._early = early._replace(late=late_rows)
        self._late = _Late(request, gradient, urgent.others(), self.step, rate)

    def _send_late(self) -> None:
        late = self._late
        if late is not None and late.arrival is None:
            self._late = late._replace(arrival=self._exchange.send_gradients(late.request, late.gradient, late.chosen))

    def _settle(self) -> None:
        """Apply the gradients that are in transit or still wait to be sent."""
        self._send_late()
        late, self._late = self._late, None
        if late is not None and late.arrival is not None:
            gathered = self._by_part([(late.request, late.arrival.wait(), late.chosen)])
            self._apply_gathered(gathered, late.step, late.rate)

    def forget(self) -> None:
        """Discard batches that were prefetched and will not be looked up; all ranks call it together."""
        if self._comparing is not None:
            self._comparing[2].wait()
        if self._early is not None:
            self._early.arrival.wait()
            if self._early.late is not None:
                self._early.late.wait()
        self._comparing = self._early = self._urgent = None
        super().forget()


class FrozenWindowTables(ShardedEmbeddingTables):
    """:class:`ShardedEmbeddingTables` whose steps have several lookups and backward passes before one update.

    The gradients of a row are summed over its occurrences in a lookup, and these sums are added in the order of ranks
    and, within a rank, of backward passes, also where a part has copies. If every rank computes consecutive slices of a
    batch, the rows and the state after an update do not depend on the number of ranks or the placement, bit for bit.
    Arguments are those of :class:`ShardedEmbeddingTables`.

    Raises:
        PlanError: If the placement cuts columns and the rule is ``rowwise_adagrad``, whose sum of squares over the
            columns of a row would be made in another order; if it asks for sums of bags; or if it does not fit the
            tables or the ranks.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ahead: tuple[RowRequest, RowsInTransit] | None = None
        self._sent: list[Arrival[list[Tensor]]] = []  # gradients of the first waiting backward pass
        if self.config.name == "rowwise_adagrad" and self._cuts_columns():
            raise PlanError(
                "the placement cuts columns, over which row-wise Adagrad sums squares in another order",
                where="parallel.placement",
                remedy="use a placement with whole rows, another rule of tables, or training.slices = 1",
            )
        if self.placement.pooled:
            raise PlanError(
                "slices send rows; the placement asks for sums of bags",
                where="parallel.pool",
                remedy="set parallel.pool = 'rows', or training.slices = 1",
            )

    @torch.no_grad()
    def fetch_ahead(self) -> None:
        """Start to send the rows of the next lookup, which no update precedes; all ranks call it together.

        The lookup was announced by :meth:`prefetch`. Rows for which a codec is chosen at each lookup are not sent
        ahead.
        """
        if self._asked and self.coders is None:
            request = self._asked[0].request
            request.wait()
            self._ahead = (request, self._exchange.send_rows(request, self._rows_by_id))

    def _fetch(self, request: RowRequest, coder: Coder | None) -> Tensor:
        ahead = self._ahead
        if ahead is None or ahead[0] is not request:
            return super()._fetch(request, coder)
        self._ahead = None
        found = torch.empty(len(request.distinct), self.embedding_dim)
        self._exchange.place_rows(request, ahead[1].wait(), found)
        return found

    @torch.no_grad()
    def send_gradients(self) -> None:
        """Start to send the gradients of backward passes since the last call; all ranks call it together.

        They are applied by :meth:`update`, which sends those that have not been sent.
        """
        self._send(self._waiting)

    def _send(self, waiting: list[Waiting]) -> None:
        for one in waiting[len(self._sent) :]:
            self._sent.append(self._exchange.send_gradients(one.asked.request, self._summed(one)))

    def _gather(self, waiting: list[Waiting]) -> dict[int, tuple[Tensor, Tensor]]:
        self._send(waiting)
        sent, self._sent = self._sent, []
        return self._by_part(
            [(one.asked.request, arrival.wait(), None) for one, arrival in zip(waiting, sent, strict=True)]
        )

    def discard(self) -> None:
        """Discard the gradients that wait for :meth:`update`; all ranks call it together if any were sent."""
        for arrival in self._sent:
            arrival.wait()
        self._sent = []
        super().discard()

    def _to_copies(self, rows: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return rows, gradient

    def update(self, learning_rate_scale: float = 1.0) -> None:
        """Apply pending gradients of all ranks; see :meth:`EmbeddingTables.update`.

        Raises:
            TrainingError: If rows are on their way that the update changes.
        """
        if self._ahead is not None:
            raise TrainingError(
                "rows that were fetched ahead have not been looked up",
                where="FrozenWindowTables",
                remedy="look up every batch of a step before its update",
            )
        super().update(learning_rate_scale)

    def forget(self) -> None:
        """Discard batches that were prefetched and will not be looked up; all ranks call it together."""
        if self._ahead is not None:
            self._ahead[1].wait()
        self._ahead = None
        super().forget()
