"""What the engine asks of a device beside its kernels: streams, marks in them, memory to copy through, graphs.

`Cuda` is a card. `Host` is the processor in its place, where Triton interprets the kernels: all is done at once, in
the thread that asks, so that everything around the kernels runs, and is tested, without a card. Imports torch alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

OUT, INTO = "out", "into"  # ways beside the kernels: from the device to the host, and back
CAPABILITY_MIN = (8, 0)  # tensor cores for bf16


class Mark(Protocol):
    """A place in the order of what was launched."""

    def wait(self) -> None:
        """Waits, this thread alone, until all before it is done."""
        ...


class Device(Protocol):
    """`name` is for people, `part` goes into the fingerprint, `where` is torch's name for it."""

    name: str
    part: str
    where: torch.device

    def host(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies from and to while the host goes on; begins at a page of the system."""
        ...

    def upload(self, values: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Brings values to the device, in the order of what is launched; they may change at once."""
        ...

    def mark(self, *, patient: bool = False) -> Mark:
        """Behind all that was launched by this thread, where it launches now. `patient`: whoever waits for it gives
        the processor away meanwhile, and hears of it some tens of microseconds later."""
        ...

    def beside(self, way: str, behind: Mark) -> contextlib.AbstractContextManager[None]:
        """What is launched inside goes beside the kernels, behind the mark and behind what went this way before."""
        ...

    def graph(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """What does all of `work` again in one launch, over the same memory, and the tensor that then holds its result.

        Graphs share memory: a result is good until the next one runs.
        """
        ...

    def free(self) -> int:
        """Bytes of its memory that nobody uses."""
        ...

    def peak(self, work: Callable[[], object]) -> int:
        """Does the work, waits for it, and returns how many bytes it took at most beside those that were taken."""
        ...


class Cuda:
    """One NVIDIA card."""

    def __init__(self, index: int = 0) -> None:
        """Raises RuntimeError where there is none."""
        self.where = torch.device("cuda", index)
        torch.cuda.set_device(self.where)
        properties = torch.cuda.get_device_properties(self.where)
        self.name = properties.name
        self.part = f"cuda sm_{properties.major}{properties.minor}"
        self._streams = {way: torch.cuda.Stream(self.where) for way in (OUT, INTO)}
        # One for all graphs: torch keeps memory for cuBLAS (32 MiB on sm_90) for each stream that ever used it.
        self._making = torch.cuda.Stream(self.where)
        self._pool = torch.cuda.graph_pool_handle()

    def host(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def upload(self, values: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """By pinned memory that torch keeps until the copy is done."""
        pinned = values.pin_memory()
        return pinned.to(self.where, non_blocking=True) if into is None else into.copy_(pinned, non_blocking=True)

    def mark(self, *, patient: bool = False) -> _Event:
        """An event in the current stream."""
        event = torch.cuda.Event(blocking=patient)
        event.record(torch.cuda.current_stream(self.where))
        return _Event(event)

    @contextlib.contextmanager
    def beside(self, way: str, behind: Mark) -> Iterator[None]:
        """One stream for each way: a card copies both at once."""
        assert isinstance(behind, _Event)
        stream = self._streams[way]
        with torch.cuda.stream(stream):
            stream.wait_event(behind.event)
            yield

    def graph(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """A CUDA graph. The first run is a usual one: it compiles what is not compiled yet."""
        stream = self._making
        stream.wait_stream(torch.cuda.current_stream(self.where))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self.where).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                result = work()
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()  # torch takes no other capture into one that was broken off
            raise
        return graph.replay, result

    def free(self) -> int:
        torch.cuda.empty_cache()  # what torch keeps for later is free as well
        return torch.cuda.mem_get_info(self.where)[0]

    def peak(self, work: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self.where)
        before = torch.cuda.memory_allocated(self.where)
        work()
        torch.cuda.synchronize(self.where)
        return torch.cuda.max_memory_allocated(self.where) - before


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class Host:
    """The processor, for tests and dry runs. `free` stands for its memory, bytes."""

    def __init__(self, free: int = 1 << 30) -> None:
        self.where = torch.device("cpu")
        self.name = self.part = "interpreted"
        self._free = free

    def host(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def upload(self, values: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return values.clone() if into is None else into.copy_(values)

    def mark(self, *, patient: bool = False) -> _Done:
        return _Done()

    @contextlib.contextmanager
    def beside(self, way: str, behind: Mark) -> Iterator[None]:
        assert way in (OUT, INTO) and isinstance(behind, _Done)
        yield

    def graph(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """The result lies where the first run has put it, as that of a graph does."""
        result = work()

        def again() -> None:
            result.copy_(work())

        return again, result

    def free(self) -> int:
        return self._free

    def peak(self, work: Callable[[], object]) -> int:
        work()
        return 0


class _Done:
    """All is done by the time it was asked for."""

    def wait(self) -> None:
        return
