"""The API's handle on the engine: spawns the child, speaks to it, notices its death and starts it again.

The engine process may die at any moment (out of memory, a driver fault, a kill). What was running then is
named to the listener once, and a new child is spawned, at once for a first crash and after a growing pause
for a child that cannot stay up. A remote engine could stand behind the same calls later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

from zjournal.link import wire

READ_BYTES = 1 << 18
SOCKET_BUFFER_BYTES = 4 << 20
RESTART_PAUSE_FIRST_S = 0.2
RESTART_PAUSE_MAX_S = 30.0
STEADY_S = 30.0  # a child that lived this long after Ready starts again without a pause
STOP_GRACE_S = 5.0
FLUSH_GRACE_S = 10.0  # more, for an engine that writes snapshots: what is not on disk yet
UNREADY_LIVES_MAX = 5  # children in a row that died before Ready: then it is no accident

# The child runs this very package, wherever it was imported from. An installed one is on the path already, behind the
# standard library, and stays there.
_START_WORKER = """
import sys
home = sys.argv.pop(1)
if home not in sys.path:
    sys.path.insert(0, home)
from zjournal.engine.worker import main
sys.exit(main())
"""

log = logging.getLogger("zjournal.link")


class Listener(Protocol):
    """Who hears from the engine. All calls come from the event loop, in the order things happened."""

    def engine_loading(self, progress: float) -> None: ...

    def engine_ready(self, ready: wire.Ready, pid: int) -> None: ...

    def engine_broken(self, broken: wire.Broken) -> None: ...

    def engine_crashed(self, pid: int, status: int, running: tuple[str, ...]) -> None: ...

    def engine_stopped(self, pid: int, status: int) -> None: ...

    def engine_said(self, message: wire.FromEngine) -> None: ...


# Gives what a new engine must know of the disk: pages of wire.Known, the last one flagged.
Known = Callable[[], AsyncIterator[wire.Known]]


class EngineClient:
    """Owns the child process and the socket to it."""

    def __init__(self, start: wire.Start, listener: Listener, known: Known | None = None) -> None:
        """`known` is asked at each start of an engine that has a folder of snapshots."""
        assert not start.snapshots or known is not None
        self._start = start
        self._listener = listener
        self._known = known
        self._told = asyncio.Event()  # the engine knows what is on disk
        self._held: list[wire.ToEngine] = []  # what may be said only then
        self._running: dict[str, None] = {}  # asked and not ended, in order
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._end_told = True  # of the process, or there is none
        self._ready_at: float | None = None
        self._stopping = False
        self._task: asyncio.Task | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    def start(self) -> None:
        """Spawns the engine and keeps one up until stop()."""
        assert self._task is None
        self._task = asyncio.get_running_loop().create_task(self._keep_up(), name="engine")

    def generate(self, message: wire.Generate) -> None:
        """Asks for a response, of an engine that has told it is ready.

        If it hung up meanwhile and its end is not known yet, the request is named to the listener with that end.
        """
        assert message.request not in self._running
        self._running[message.request] = None
        self._send(message)

    def cancel(self, request: str, keep: bool = False) -> None:
        """Gives up a request; the engine answers with Finished. Unknown and ended requests are ignored.

        `keep`: what it has computed is written to disk.
        """
        if request in self._running:
            self._send(wire.Cancel(request, keep))

    def committed(self, fact: int) -> None:
        """Tells the engine that its cache fact is durable. A fact of an engine that died meanwhile is dropped."""
        self._send(wire.Committed(fact))

    def forget(self, requests: tuple[str, ...]) -> None:
        """Tells the engine to give up what it keeps of these requests alone. A new engine keeps nothing anyway."""
        self._send(wire.Forget(requests))

    def tell(self, message: wire.Refused | wire.Foreign | wire.Pin | wire.Purge) -> None:
        """Says something of the snapshots. An engine that is starting hears it once it knows what is on disk."""
        self._send_known(message)

    async def watch(self) -> None:
        """Returns once no engine is kept up any more; raises what went wrong in here, for nothing else would tell."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Ends the child: asks, waits STOP_GRACE_S, longer where it has to write, then kills."""
        self._stopping = True
        grace = STOP_GRACE_S + (FLUSH_GRACE_S if self._start.snapshots else 0)
        self._send(wire.Stop())
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), grace)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None and not self._end_told and self._process.returncode is not None:
            self._end_told = True
            self._listener.engine_stopped(self._process.pid, self._process.returncode)

    def _send(self, message: wire.ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.frame(message))

    def _send_known(self, message: wire.ToEngine) -> None:
        if self._told.is_set():
            self._send(message)
        elif self._writer is not None:
            self._held.append(message)

    async def _tell_known(self) -> None:
        """Says what is on disk, then what has changed since that was read."""
        if self._start.snapshots:
            assert self._known is not None
            async for page in self._known():
                self._send(page)
                if self._writer is not None and not self._writer.is_closing():
                    await self._writer.drain()
        held, self._held = self._held, []
        self._told.set()
        for message in held:
            self._send(message)

    async def _keep_up(self) -> None:
        pause = 0.0
        unready = 0
        while not self._stopping:
            if pause:
                await asyncio.sleep(pause)
            status, broken = await self._one_life()
            if self._stopping:
                return
            if broken is not None:  # a model that cannot be loaded will not load the next time either
                self._listener.engine_broken(broken)
                return
            unready = 0 if self._ready_at is not None else unready + 1
            if unready >= UNREADY_LIVES_MAX:
                message = f"the engine process died {unready} times while loading, the last time with status {status}"
                self._listener.engine_broken(wire.Broken("engine_start", message))
                return
            steady = self._ready_at is not None and time.monotonic() - self._ready_at > STEADY_S
            pause = 0.0 if steady else min(max(2 * pause, RESTART_PAUSE_FIRST_S), RESTART_PAUSE_MAX_S)
            log.warning("engine ended with status %s; starting it again in %.1f s", status, pause)

    async def _one_life(self) -> tuple[int, wire.Broken | None]:
        """Runs one child from spawn to its end. Returns its wait status and its last words, if it had any."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._ready_at = None
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # else the folder that the server was started in comes first, and a numpy.py there is run
            "-c",
            _START_WORKER,
            str(Path(__file__).resolve().parent.parent.parent),
            "--fd",
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._end_told = False
        theirs.close()
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._told.clear()
        self._held.clear()
        self._send(self._start)
        telling = asyncio.ensure_future(self._tell_known())
        telling.add_done_callback(self._known_told)
        broken = None
        try:
            broken = await self._listen(reader)
        finally:
            telling.cancel()
            self._writer.close()
            self._writer = None
        status = await self._ended(self._process)
        self._end_told = not self._stopping
        if not self._stopping and broken is None:
            running, self._running = tuple(self._running), {}
            self._listener.engine_crashed(self._process.pid, status, running)
        return status, broken

    def _known_told(self, telling: asyncio.Future[None]) -> None:
        """An engine that cannot be told what is on disk must not go on: it would wait for ever."""
        if telling.cancelled() or telling.exception() is None or isinstance(telling.exception(), ConnectionError):
            return
        log.error("the engine could not be told what is on disk", exc_info=telling.exception())
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """The wait status of a child that hung up; one that does not leave by itself is killed."""
        try:
            return await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            log.warning("engine %d hung up and does not end; killing it", process.pid)
            process.kill()
            return await process.wait()

    async def _listen(self, reader: asyncio.StreamReader) -> wire.Broken | None:
        """Passes on what the child says until it hangs up."""
        deframer = wire.Deframer(wire.FromEngine)
        broken = None
        while True:
            try:
                data = await reader.read(READ_BYTES)
            except ConnectionError:  # killed with unread bytes in its socket
                data = b""
            if not data:
                return broken
            for message in deframer.feed(data):
                match message:
                    case wire.Broken():
                        broken = message
                    case wire.Loading():
                        self._listener.engine_loading(message.progress)
                    case wire.Ready():
                        self._ready_at = time.monotonic()
                        assert self._process is not None
                        self._listener.engine_ready(message, self._process.pid)
                    case _:
                        if isinstance(message, wire.Finished | wire.Failed):
                            self._running.pop(message.request, None)
                        self._listener.engine_said(message)
