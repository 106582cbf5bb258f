"""The server's end of `admin.sock`: runs operations on the journal for commands that are run beside the server.

One frame in, one frame out, then the connection ends. An operation runs in a thread, one at a time, and goes on to its
end when the command that asked for it is gone. One that asks the engine runs beside the others, and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from zjournal import errors
from zjournal.journal.log import Journal
from zjournal.link import admin
from zjournal.sessions import operations

CALL_S_MAX = 10.0  # for the frame to arrive
CALLS_MAX = 16  # connections at a time

EngineWork = Callable[[Any], Awaitable[msgspec.Struct]]

log = logging.getLogger("zjournal.api")


class AdminSocket:
    """Answers on the socket of a data directory that this process owns."""

    def __init__(
        self, journal: Journal, data_dir: Path, with_engine: Mapping[str, EngineWork] = MappingProxyType({})
    ) -> None:
        """`with_engine`: what does the operations of operations.WITH_ENGINE, by their names."""
        self._journal = journal
        self._data_dir = data_dir
        self._with_engine = with_engine
        self._calls: set[asyncio.Task] = set()
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listens while the body runs; at its end waits for the operation that runs.

        Where the socket cannot be made the server does without it and says so: only commands beside it are lost.
        """
        server = await self._bind()
        try:
            yield
        finally:
            if server is not None:
                server.close()
                (self._data_dir / admin.SOCKET_FILE).unlink(missing_ok=True)
            await asyncio.gather(*self._calls, return_exceptions=True)

    async def _bind(self) -> asyncio.Server | None:
        path = self._data_dir / admin.SOCKET_FILE
        try:
            # The data directory is ours alone, and locked: what lies here was left by a server that was killed.
            if os.path.lexists(path) and stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
            with admin.address(self._data_dir) as address:
                server = await asyncio.start_unix_server(self._accept, address)
            path.chmod(0o600)
        except OSError as error:
            log.warning(
                "%s cannot be made (%s): commands cannot change this journal while the server runs", path, error
            )
            return None
        return server

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._calls) >= CALLS_MAX:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._answer(reader, writer))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            outcome = await self._outcome(reader)
            writer.write(admin.frame(outcome))
            await writer.drain()
        except (OSError, EOFError, TimeoutError):
            pass  # the command is gone, or it was none
        finally:
            writer.close()

    async def _outcome(self, reader: asyncio.StreamReader) -> admin.Outcome:
        try:
            async with asyncio.timeout(CALL_S_MAX):
                length = admin.length_of(await reader.readexactly(admin.LENGTH_BYTES))
                body = await reader.readexactly(length)
            try:
                call = admin.decode_call(body)
            except msgspec.MsgspecError as error:
                raise errors.BadRequest(f"the call cannot be read: {error}") from None
            if call.version != admin.VERSION:
                raise errors.BadRequest(
                    f"the server speaks version {admin.VERSION} of admin.sock and the command version {call.version}; "
                    "use the zj that the server was started with"
                )
            log.info("admin: %s", call.name)
            if call.name in self._with_engine:
                result = await self._asking(call, reader)
            else:
                async with self._turn:
                    result = await asyncio.to_thread(operations.run, self._journal, call.name, bytes(call.arguments))
            outcome = admin.Outcome(admin.VERSION, msgspec.Raw(result))
            admin.frame(outcome)  # a result that is too long is a fault of this call
        except errors.Fault as fault:
            return admin.Outcome(admin.VERSION, failure=admin.failure_of(fault))
        except (OSError, EOFError, TimeoutError):
            raise
        except Exception as error:  # our bug: the command must not wait for ever
            log.exception("an operation failed")
            failed = errors.Fault(f"the server failed on this operation ({type(error).__name__}); see its log")
            return admin.Outcome(admin.VERSION, failure=admin.failure_of(failed))
        return outcome

    async def _asking(self, call: admin.Call, reader: asyncio.StreamReader) -> bytes:
        """An operation that asks the engine. It takes long, so others run beside it, and it ends with its command."""
        work = self._with_engine[call.name]
        arguments = operations.decode(call.name, operations.WITH_ENGINE[call.name].arguments, bytes(call.arguments))
        working = asyncio.ensure_future(work(arguments))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EOFError
            return await asyncio.to_thread(operations.done, self._journal, call.name, working.result())
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)
