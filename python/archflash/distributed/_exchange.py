"""Messages between the ranks of a group that travel while kernels run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from archflash.distributed._agree import GroupError

_HEAD_START = 20_000  # clock cycles: about 10 us
Message = tuple[int, Tensor]  # rank in the group, and contiguous rows to send or to receive into


@dataclass
class Pending:
    """Messages under way. `wait` lets the current stream, or on the CPU the caller, wait for them;
    until then the tensors must be left alone.

    Attributes:
        after: with it several streams wait, each in a call of its own, for this event, too.
        has_time: whether the current stream has other work before its next kernel of attention.
    """

    after: torch.cuda.Event | None = None
    has_time: bool = False
    _works: list[dist.Work] = field(default_factory=list)
    _staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _held: list[Tensor] = field(default_factory=list)

    def let_start(self) -> None:
        """Keeps the current stream from its next kernel for a moment, so that NCCL's kernel gets
        its SMs first. One of attention that is resident on all SMs would let it wait to the end.
        """
        if self._works and not self.has_time and any(x.is_cuda for x in self._held):
            torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        with _lost():
            for work in self._works:
                work.wait()
        for target, received in self._staged:
            target.copy_(received)
        self._staged = []
        if self.after is None:
            self._works = []
        else:
            torch.cuda.current_stream(self.after.device).wait_event(self.after)


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """Makes errors of torch.distributed a GroupError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise GroupError(
            "a message between the ranks of the group did not arrive: one of them died, was slower "
            "than the group's time-out, or raised an error in the middle of this call. Make a new "
            f"group (torch.distributed.new_group) to go on: {error}"
        ) from error


def start(
    group: dist.ProcessGroup | None, sends: Sequence[Message], receives: Sequence[Message]
) -> Pending:
    """Starts messages. Those of two ranks arrive in the order in which they are listed, and both
    ranks must list the same.
    """
    pending = Pending()
    operations = []
    for operation, messages in ((dist.isend, sends), (dist.irecv, receives)):
        for rank, x in messages:
            assert x.is_contiguous()
            if not x.numel():
                continue
            carried = x
            if x.is_cuda and not carries(group, x.device):
                # The group has no backend for GPUs, as gloo: by way of the CPU.
                carried = x.cpu() if operation is dist.isend else torch.empty_like(x, device="cpu")
                if operation is dist.irecv:
                    pending._staged.append((x, carried))
            peer = rank if group is None else dist.get_global_rank(group, rank)
            operations.append(dist.P2POp(operation, carried, peer, group))
            pending._held.append(carried)
    if operations:
        with _lost():
            pending._works = dist.batch_isend_irecv(operations)
    return pending


@dataclass(frozen=True)
class Block:
    """Rows to send, or to receive into, one rank's behind another's in a contiguous tensor.

    Attributes:
        rows: how many of each rank of the group.
    """

    x: Tensor
    rows: list[int]


def start_in_one(group: dist.ProcessGroup | None, sends: Block, receives: Block) -> Pending:
    """Starts the messages of all ranks of a group, each of which calls this: for the host it is
    one operation.
    """
    pending = Pending()
    given, taken = sends.x, receives.x
    if given.is_cuda and not carries(group, given.device):
        given, taken = given.cpu(), torch.empty_like(taken, device="cpu")
        pending._staged.append((receives.x, taken))
    pending._held += [given, taken]
    with _lost():
        work = dist.all_to_all_single(
            taken, given, receives.rows, sends.rows, group=group, async_op=True
        )
    pending._works = [work]
    return pending


def carries(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether a group sends tensors of a device by itself. gloo takes those of the CPU only."""
    backends = dict(x.split(":") for x in dist.get_backend_config(group).split(","))
    return device.type in backends and (device.type == "cpu" or backends[device.type] != "gloo")
