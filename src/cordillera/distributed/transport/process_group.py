"""A backend of torch.distributed for tensors on CPUs: ``init_process_group("cordillera")``.

Collectives are those of torch.distributed, with its arguments; sizes may differ between ranks wherever it lets them.
"""

# torch declares overloads of every collective, and calls only the one with options
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from cordillera.distributed.collective_tuning import GATHERED, CollectiveTuning, gather_plan, tuning_of_environment
from cordillera.distributed.tracing.rank_trace import ANY_RANK
from cordillera.distributed.transport.communicator import Communicator, Path, checked_timeout
from cordillera.distributed.transport.operations import (
    Local,
    Offer,
    PeerTask,
    ProgramStep,
    ReduceFunction,
    Take,
    Task,
    TransportOperation,
    as_bytes,
    program,
    tasks_of,
)
from cordillera.distributed.transport.progress import TransportError
from cordillera.distributed.transport.signatures import signed
from cordillera.distributed.transport.tensors import (
    average,
    checked,
    copied,
    reduction_of,
    refuse_overlaps,
    sparse_sum,
    split_evenly,
    split_rows,
)
from cordillera.errors import PlanError
from cordillera.planning.network.collective_plans import all_reduced, scattered

BACKEND = "cordillera"
"""Name of the backend."""

_TENSOR_INDICES = 1 << 32  # transfer numbers reserved for each tensor of an operation


@dataclass(frozen=True)
class TransportOptions:
    """Options of a process group, the ``pg_options`` of torch.distributed.

    Attributes:
        path: How bytes pass between ranks of one host: ``auto`` reads memory, ``sockets`` never does.
        tuning: Rules for plans; None for those of the file that the environment variable ``CORDILLERA_TUNING`` names.
    """

    path: Path = "auto"
    tuning: CollectiveTuning | None = None


class OperationWork(dist.Work):
    """An operation that has begun, as torch.distributed returns it.

    Args:
        communicator: Communicator of the operation.
        operation: The operation.
    """

    def __init__(self, communicator: Communicator, operation: TransportOperation) -> None:
        super().__init__()
        self._communicator, self._operation = communicator, operation
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done.

        Args:
            timeout: Longest time; None or zero for that of the operation.

        Raises:
            TransportError: If it was given up.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        self._communicator.wait(self._operation, seconds if seconds > 0 else None)
        return True

    def is_completed(self) -> bool:
        """Whether the operation is done or was given up."""
        return self._operation.is_done

    def is_success(self) -> bool:
        """Whether the operation is done and was not given up."""
        return self._operation.is_done and self._operation.error is None

    def exception(self) -> Exception | None:
        """Return why the operation was given up, if it was."""
        return self._operation.error

    def synchronize(self) -> None:
        """Wait until the operation is done."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that the caller receives."""
        return list(self._operation.result)

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        return next(task.peer for task in self._operation.tasks if isinstance(task, PeerTask))

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors that the caller receives."""
        if self._future is None:
            self._future = Future()
            self._communicator.notify(self._operation, self._resolve)
        return self._future

    def _resolve(self) -> None:
        assert self._future is not None
        if self._operation.error is not None:
            self._future.set_exception(self._operation.error)
        else:
            self._future.set_result(self.result())


class TransportProcessGroup(dist.ProcessGroup):
    """A process group of torch.distributed over a :class:`~cordillera.distributed.transport.communicator.Communicator`.

    Args:
        store: Store of the group.
        rank: Rank of this process.
        size: Number of ranks.
        timeout: Longest time of an operation.
        name: Name for messages.
        ranks: Ranks of the members in the job; by default those of the group.
        options: Options.
        parent: Group of all ranks of the job, if it is of this kind.

    Attributes:
        tuning: Rules for plans, which are those of all ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        name: str = "",
        ranks: Sequence[int] = (),
        options: TransportOptions | None = None,
        parent: TransportProcessGroup | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # with a store, torch builds no Python group
        self._own, self._size = rank, size  # torch's take microseconds
        self._names = [name, "undefined"]
        options = options or TransportOptions()
        self.tuning = options.tuning if options.tuning is not None else tuning_of_environment()
        self.communicator: Communicator = Communicator(
            store, rank, size, timeout_s=timeout.total_seconds(), name=name, ranks=ranks, path=options.path,
            parent=None if parent is None else parent.communicator,
        )  # fmt: skip

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def getGroupName(self) -> str:
        """Return the name that torch.distributed gave to the group."""
        return self._names[0]

    def setGroupName(self, name: str) -> None:
        """Keep the name that torch.distributed gives to the group."""
        self._names[0] = name

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._names[1]

    def setGroupDesc(self, description: str) -> None:
        """Keep the description of the group."""
        self._names[1] = description
        if description != "undefined":
            self.communicator.describe(description)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Send the one of ``tensors`` of ``opts.rootRank`` to all."""
        (tensor,) = checked(tensors)
        mine, root = as_bytes(tensor), opts.rootRank
        tasks: list[Task] = (
            [Offer(peer=peer, views=[mine]) for peer in self._others()]
            if self._own == root
            else [Take(peer=root, views=[mine])]
        )
        return self.run("broadcast", tasks, [tensor], tensor.dtype, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce the one of ``tensors`` of all ranks in place, by ``opts.reduceOp``; sparse ones can be summed."""
        if len(tensors) == 1 and tensors[0].layout != torch.strided:
            name, _ = reduction_of(opts, tensors[0].dtype)
            if name != "sum":
                raise PlanError(f"{name} of sparse tensors is not supported", where="op", remedy="SUM")
            tasks, add = sparse_sum(tensors[0], self._own, self._others())
            return self.run("sparse_all_reduce", tasks, tensors, tensors[0].dtype, opts, name, finish=add)
        return self.allreduce_coalesced(checked(tensors), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce several ``tensors`` in place, by ``opts.reduceOp``."""
        name, reduce = reduction_of(opts, *(tensor.dtype for tensor in tensors))
        plans = [self.tuning.plan("all_reduce", self._size, one.nbytes) for one in checked(tensors, several=True)]
        parts = [self._all_reduced(one, reduce, plan) for one, plan in zip(tensors, plans, strict=True)]
        refuse_overlaps("all_reduce", tensors)
        divide = average(name, tensors, self._size)
        return self.run("all_reduce", _joined(parts), tensors, tensors[0].dtype, opts, name, plans[0], finish=divide)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce ``tensors``, one a rank, in that of ``opts.rootRank``; those of the others stay as they are."""
        (tensor,) = checked(tensors)
        name, reduce = reduction_of(opts, tensor.dtype)
        mine, root = as_bytes(tensor), opts.rootRank
        if self._own != root:
            return self.run("reduce", [Offer(peer=root, views=[mine])], [tensor], tensor.dtype, opts, name)
        tasks: list[Task] = []
        for peer in self._others():
            take = Take(peer=peer, views=[mine], reduce=reduce, dtype=tensor.dtype)
            take.after(*tasks[-1:])
            tasks.append(take)
        divide = average(name, [tensor], self._size)
        return self.run("reduce", tasks, [tensor], tensor.dtype, opts, name, finish=divide)

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Collect ``input_tensors``, one a rank, whose sizes may differ, in ``output_tensors`` of all ranks.

        Of ``opts`` the timeout counts.
        """
        return self._gather_all(output_tensors, input_tensors, output_tensors[0], opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Collect several tensors, ``input_list``, of all ranks in the ``output_lists`` of all; ``opts`` as above."""
        by_input = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self._gather_all(by_input, input_list, [one for outputs in output_lists for one in outputs], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Concatenate each of ``inputs`` of all ranks in one of ``outputs`` of all ranks; ``opts`` as above."""
        parts = [split_evenly(one, self._size) for one in checked(outputs, several=True)]
        return self._gather_all(parts, inputs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Concatenate ``input`` of all ranks in ``output`` of all ranks; ``opts`` as above."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Collect ``input_tensors``, one a rank, in ``output_tensors`` of ``opts.rootRank``."""
        (given,), root = checked(input_tensors), opts.rootRank
        if self._own != root:
            return self.run("gather", [Offer(peer=root, views=[as_bytes(given)])], [], given.dtype, opts)
        (outputs,) = output_tensors
        tasks: list[Task] = [copied(given, outputs[root])]
        tasks += [Take(peer=peer, views=[as_bytes(checked([outputs[peer]])[0])]) for peer in self._others()]
        refuse_overlaps("gather", outputs, [given], [(given, outputs[root])])
        return self.run("gather", tasks, outputs, given.dtype, opts)

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Scatter the ``input_tensors`` of ``opts.rootRank``, one to each rank, into ``output_tensors``."""
        (output,), root = checked(output_tensors), opts.rootRank
        if self._own != root:
            return self.run("scatter", [Take(peer=root, views=[as_bytes(output)])], [output], output.dtype, opts)
        (inputs,) = input_tensors
        tasks: list[Task] = [copied(inputs[root], output)]
        tasks += [Offer(peer=peer, views=[as_bytes(checked([inputs[peer]])[0])]) for peer in self._others()]
        refuse_overlaps("scatter", [output], inputs, [(inputs[root], output)])
        return self.run("scatter", tasks, [output], output.dtype, opts)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduce ``input_tensors``, one for each rank, by ``opts.reduceOp``; ``output_tensors`` takes this rank's."""
        return self._scatter_reduced(output_tensors, input_tensors, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce ``inputs`` by ``opts.reduceOp``; each of ``outputs`` takes this rank's share of one."""
        return self._scatter_reduced(
            outputs, [split_evenly(one, self._size) for one in checked(inputs, several=True)], opts
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce ``input`` of all ranks by ``opts.reduceOp``; ``output`` takes this rank's share."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Send each rank its one of ``input_tensors``, of any sizes; ``output_tensors`` takes one from each.

        Of ``opts`` the timeout counts.
        """
        outputs, inputs = checked(output_tensors, several=True), checked(input_tensors, several=True)
        for tensors in (outputs, inputs):
            if len(tensors) != self._size:
                raise PlanError(f"{len(tensors)} tensors for {self._size} ranks", where="all_to_all")
        own = self._own
        tasks: list[Task] = [copied(inputs[own], outputs[own])]
        for peer in self._others():
            tasks.append(Offer(peer=peer, views=[as_bytes(inputs[peer])]))
            tasks.append(Take(peer=peer, views=[as_bytes(outputs[peer])]))
        refuse_overlaps("all_to_all", outputs, inputs, [(inputs[own], outputs[own])])
        dtype = inputs[own].dtype
        return self.run("all_to_all", tasks, outputs, dtype, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Send each rank some rows of ``input``; ``output`` takes some from each; ``opts`` as above.

        ``input_split_sizes`` and ``output_split_sizes`` say how many; without them, equally many.
        """
        parts = [
            split_rows(checked([tensor])[0], sizes, self._size)
            for tensor, sizes in ((output, output_split_sizes), (input, input_split_sizes))
        ]
        return self.alltoall(parts[0], parts[1], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until all ranks have come here, or the timeout of ``opts`` has passed."""
        parts = [torch.empty(0, dtype=torch.uint8)] * self._size
        tasks = tasks_of(_program("all-gather", self._size, self._own, "direct"), parts, torch.uint8)
        return self.run("barrier", tasks, [], torch.uint8, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 reports the missing ones.

        Args:
            timeout: Longest time; None for that of the group.
            wait_all_ranks: Whether rank 0 names all ranks that have not come, or the first of them.

        Raises:
            TransportError: If a rank does not come in time. The group is then given up.
        """
        own, none = self.communicator.ranks[self._own], torch.empty(0, dtype=torch.uint8)
        opts = dist.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        if timeout is not None and not timeout:
            self.communicator.abort(f"rank {own} timed out in monitoredBarrier, whose timeout is 0 s")
            raise TransportError(f"Rank {own} timed out in monitoredBarrier, whose timeout is 0 s")
        is_first = self._own == 0
        peers = self._others() if is_first else [0]
        takes = [Take(peer=peer, index=0 if is_first else 1, views=[none]) for peer in sorted(peers)]
        offers = [Offer(peer=peer, index=1 if is_first else 0, views=[none]) for peer in peers]
        for one in offers if is_first else takes:
            one.after(*(takes if is_first else offers))
        try:
            self.run("monitored_barrier", [*takes, *offers], [], torch.uint8, opts).wait()
        except TransportError as error:
            absent = [self.communicator.ranks[one.peer] for one in takes if not one.is_done]
            who, said = ", ".join(map(str, absent if wait_all_ranks else absent[:1])), error.what
            if is_first and absent:  # Gloo's message, which programs look for
                said = f"Rank{'s' * (',' in who)} {who} failed to pass monitoredBarrier ({said})"
            elif not is_first:
                first = self.communicator.ranks[0]
                said = f"Rank {own} successfully reached monitoredBarrier, but received errors while waiting for "
                said += f"send/recv from rank {first} ({error.what})"
            raise TransportError(said, where=error.where) from error

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Send the one of ``tensors`` to rank ``dst`` of the group, under a ``tag``."""
        (tensor,) = checked(tensors)
        number = self.communicator.message_number(dst, tag)
        return self._pass(Offer(peer=dst, index=number, views=[as_bytes(tensor)]), tensor, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Receive the tensor in ``tensors`` from rank ``src`` of the group, under a ``tag``."""
        (tensor,) = checked(tensors)
        return self._pass(Take(peer=src, views=[as_bytes(tensor)]), tensor, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Receive the tensor in ``tensors`` from any rank under a ``tag``; ``Work.source_rank`` gives the sender."""
        (tensor,) = checked(tensors)
        if self._size == 1:
            raise PlanError("there is no other rank", where="recv")
        return self._pass(Take(peer=ANY_RANK, views=[as_bytes(tensor)], sources={*self._others()}), tensor, tag)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest time of an operation to ``timeout``."""
        self.communicator.timeout_s = checked_timeout(timeout.total_seconds())

    def abort(self) -> None:
        """Abort all operations of all ranks."""
        self.communicator.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Leave the group."""
        self.communicator.abort("the process group was destroyed")

    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next one."""
        return [(self._own + step) % self._size for step in range(1, self._size)]

    def _all_reduced(self, tensor: Tensor, reduce: ReduceFunction, plan: str) -> list[Task]:
        """Return the tasks of reducing a tensor over all ranks."""
        if plan != GATHERED:
            chunks = [as_bytes(part) for part in tensor.detach().reshape(-1).tensor_split(self._size)]
            return tasks_of(_program("all-reduce", self._size, self._own, plan), chunks, tensor.dtype, reduce)
        gathered = tensor.detach().new_empty((self._size, *tensor.shape))
        gathered[self._own] = tensor.detach()
        steps = _program("all-gather", self._size, self._own, "direct")
        tasks = tasks_of(steps, [as_bytes(part) for part in gathered], tensor.dtype)

        def add() -> None:
            total = gathered[0]
            for part in gathered[1:]:  # in the order of ranks, for bitwise equal sums on all ranks
                reduce(total, part, out=total)
            tensor.detach().copy_(total)

        last = Local(run=add)
        last.after(*tasks)
        return [*tasks, last]

    def _gather_all(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], result: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        parts = []
        plan = self.tuning.plan("all_gather", self._size, sum(output.nbytes for one in outputs for output in one))
        for one, given in zip(outputs, checked(inputs, several=True), strict=True):
            if len(one) != self._size:
                raise PlanError(f"{len(one)} outputs for {self._size} ranks", where="all_gather")
            chunks = [as_bytes(output) for output in checked(one, several=True)]
            own = copied(given, one[self._own])
            tasks = tasks_of(_program("all-gather", self._size, self._own, plan), chunks, given.dtype)
            for task in tasks:
                task.after(own)
            parts.append([own, *tasks])
        kept = [(given, one[self._own]) for one, given in zip(outputs, inputs, strict=True)]
        refuse_overlaps("all_gather", [output for one in outputs for output in one], inputs, kept)
        return self.run("all_gather", _joined(parts), result, inputs[0].dtype, opts, plan=plan)

    def _scatter_reduced(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        name, reduce = reduction_of(opts, *(output.dtype for output in outputs))
        parts = []
        plan = self.tuning.plan("reduce_scatter", self._size, sum(given.nbytes for one in inputs for given in one))
        for output, one in zip(checked(outputs, several=True), inputs, strict=True):
            if len(one) != self._size:
                raise PlanError(f"{len(one)} inputs for {self._size} ranks", where="reduce_scatter")
            checked(one, several=True)  # plans other than the direct one accumulate into data that they forward
            chunks = [as_bytes(given if plan == "direct" else given.detach().clone()) for given in one]
            own = copied(one[self._own], output)
            chunks[self._own] = as_bytes(output)
            tasks = tasks_of(_program("reduce-scatter", self._size, self._own, plan), chunks, output.dtype, reduce)
            for task in tasks:
                task.after(own)
            parts.append([own, *tasks])
        kept = [(one[self._own], output) for output, one in zip(outputs, inputs, strict=True)]
        refuse_overlaps("reduce_scatter", outputs, [given for one in inputs for given in one], kept)
        divide = average(name, outputs, self._size)
        dtype = outputs[0].dtype
        return self.run("reduce_scatter", _joined(parts), outputs, dtype, opts, name, plan, finish=divide)

    def _pass(self, task: PeerTask, tensor: Tensor, tag: int) -> dist.Work:
        if task.peer == self._own:
            raise PlanError("a rank cannot send to itself", where="send")
        operation = TransportOperation(
            "message", signed("message", tensor.dtype), [task], [tensor], tensor.nbytes,
            timeout_s=self.communicator.timeout_s, is_message=True, sequence=tag,
        )  # fmt: skip
        self.communicator.start(operation)
        return OperationWork(self.communicator, operation)

    def run(
        self,
        collective: str,
        tasks: list[Task],
        result: Sequence[Tensor],
        dtype: torch.dtype,
        opts: Any,
        reduction: str = "none",
        plan: str = "direct",
        *,
        finish: Callable[[], Any] | None = None,
    ) -> dist.Work:
        """Start a collective.

        Args:
            collective: Its name.
            tasks: What this rank does.
            result: Tensors that the caller receives.
            dtype: Type of the elements.
            opts: Options of torch.distributed, of which the timeout and whether it is asynchronous count.
            reduction: Name of the reduction.
            plan: Name of the plan.
            finish: What is done after all tasks.

        Raises:
            PlanError: If the timeout is not acceptable, or the type is not carried.
        """
        timeout_s = self.communicator.timeout_s
        given = getattr(opts, "timeout", None)
        if given is not None and given.total_seconds() > 0:
            timeout_s = given.total_seconds()
        elif given is not None and given.total_seconds() < -1e-3:  # torch's default is -1 ms
            raise PlanError(f"timeout is {given.total_seconds():g} s", where=collective, remedy="a time above 0")
        operation = TransportOperation(
            collective, signed(collective, dtype, reduction, plan), tasks, result,
            sum(one.nbytes for one in result if one.layout == torch.strided), timeout_s=timeout_s, finish=finish,
        )  # fmt: skip
        self.communicator.start(operation, in_background=bool(getattr(opts, "asyncOp", True)))
        return OperationWork(self.communicator, operation)


def _joined(parts: Sequence[Sequence[Task]]) -> list[Task]:
    """Merge the tasks of several tensors into one operation."""
    for number, tasks in enumerate(parts):
        for task in tasks:
            if isinstance(task, PeerTask):
                task.index += number * _TENSOR_INDICES
    return [task for tasks in parts for task in tasks]


@functools.lru_cache(256)
def _program(collective: str, size: int, rank: int, plan: str) -> tuple[ProgramStep, ...]:
    gather = gather_plan(plan, size)
    if collective == "all-gather":
        return program(gather, rank)
    return program(scattered(gather) if collective == "reduce-scatter" else all_reduced(gather), rank)


def _create(options: Any, chosen: TransportOptions | None) -> TransportProcessGroup:
    world = dist.GroupMember.WORLD
    return TransportProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        name=options.group_id,
        ranks=options.global_ranks_in_group,
        options=chosen,
        parent=world if isinstance(world, TransportProcessGroup) else None,
    )


def register() -> None:
    """Make the backend known to torch.distributed. Registering again does nothing."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
