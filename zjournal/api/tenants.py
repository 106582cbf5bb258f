"""Tenants: whose a key is, and what the limits of its name leave to it. On the clock of the machine.

The file of keys is read again when it has changed, so a key that was taken out of it is refused from then on, and a new
one works, without a restart.
"""

from __future__ import annotations

import logging
import time

from zjournal import errors
from zjournal.api import limits
from zjournal.journal.log import Journal
from zjournal.keys import ApiKeys, KeyFile, Limits

LOCAL = "local"
LOOK_S = 1.0  # how often, at most, it is looked whether the file has changed

log = logging.getLogger("zjournal.api")


class Tenants:
    """The tenants of one server. Belongs to the event loop."""

    def __init__(self, journal: Journal, file: KeyFile | None) -> None:
        """Without a `file` all are the tenant `local`; else a tenant belongs to a key's name, so keys can rotate."""
        self._journal = journal
        self._file = file
        self._keys: ApiKeys | None = None
        self._tenants: dict[str, str] = {}  # by name
        self._names: dict[str, str] = {}  # the other way round
        self._allowances: dict[str, limits.Allowance] = {}  # by tenant
        self._limits: dict[str, Limits] = {}  # those of `_allowances`
        self._look_at = time.monotonic() + LOOK_S
        self._told = ""  # what was wrong with the file the last time
        if file is None:
            self._tenants[LOCAL] = journal.tenant(LOCAL).id
            self._names[self._tenants[LOCAL]] = LOCAL
        else:
            self._take(file.keys)

    def of(self, key: str | None) -> str:
        """The tenant whose key this is. Raises Unauthorized."""
        if self._file is None:
            return self._tenants[LOCAL]
        self._look(self._file)
        if key is None:
            raise errors.Unauthorized("An API key is required: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        assert self._keys is not None
        name = self._keys.name_of(key)
        if name is None:
            raise errors.Unauthorized("The API key is not known.")
        return self._tenants[name]

    def name_of(self, tenant: str) -> str:
        """The name beside this tenant's keys; "" where it has none any more."""
        return self._names.get(tenant, "")

    def _look(self, file: KeyFile) -> None:
        """Takes what the file has now; where it cannot be read, what it had stays."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        told = ""
        try:
            if file.changed() or file.keys != self._keys:
                self._take(file.keys)
                log.info("the file of API keys has changed and was read again")
        except errors.Fault as fault:
            told = fault.message
            if told != self._told:
                log.error("%s; the keys that were read before it go on", told)
        self._told = told

    def _take(self, keys: ApiKeys) -> None:
        """Whose the keys are from now on. A name whose limits have not changed has left what it had left."""
        now = time.monotonic()
        tenants = {name: self._tenants.get(name) or self._journal.tenant(name).id for name in keys.names}
        given = {tenants[name]: allowed for name in keys.names if (allowed := keys.limits(name)) != Limits()}
        self._allowances = {
            tenant: self._allowances[tenant] if self._limits.get(tenant) == allowed else limits.Allowance(allowed, now)
            for tenant, allowed in given.items()
        }
        self._limits, self._tenants, self._keys = given, tenants, keys
        self._names = {tenant: name for name, tenant in tenants.items()}

    def allowed(self, tenant: str) -> list[limits.Told]:
        """What the limits of this tenant's keys leave; empty where there are none."""
        allowance = self._allowances.get(tenant)
        return [] if allowance is None else allowance.told(time.monotonic())

    def enter(self, tenant: str, running: int | None) -> None:
        """A request comes while `running` of the tenant's are being accepted or answered; None: it asks for no answer.

        Raises RateLimited.
        """
        allowance = self._allowances.get(tenant)
        if allowance is not None:
            allowance.enter(running, time.monotonic())

    def spend(self, tenant: str, tokens: int) -> None:
        """So many tokens were read or written for the tenant."""
        allowance = self._allowances.get(tenant)
        if allowance is not None:
            allowance.spend(tokens, time.monotonic())
