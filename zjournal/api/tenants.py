"""Tenants: whose a key is, and what the limits of its name leave to it. On the clock of the machine."""

from __future__ import annotations

import time

from zjournal import errors
from zjournal.api import limits
from zjournal.journal.log import Journal
from zjournal.keys import ApiKeys, Limits

LOCAL = "local"


class Tenants:
    """The tenants of one server. Belongs to the event loop."""

    def __init__(self, journal: Journal, keys: ApiKeys | None) -> None:
        """Without `keys` everyone is the tenant `local`; else a tenant belongs to a key's name, so keys can rotate."""
        self._keys = keys
        names = keys.names if keys is not None else (LOCAL,)
        self._tenants = {name: journal.tenant(name).id for name in names}
        now = time.monotonic()
        self._allowances = {
            self._tenants[name]: limits.Allowance(allowed, now)
            for name in names
            if keys is not None and (allowed := keys.limits(name)) != Limits()
        }

    def of(self, key: str | None) -> str:
        """The tenant whose key this is. Raises Unauthorized."""
        if self._keys is None:
            return self._tenants[LOCAL]
        if key is None:
            raise errors.Unauthorized("An API key is required: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        name = self._keys.name_of(key)
        if name is None:
            raise errors.Unauthorized("The API key is not known.")
        return self._tenants[name]

    def allowed(self, tenant: str) -> list[limits.Told]:
        """What the limits of this tenant's keys leave; empty where there are none."""
        allowance = self._allowances.get(tenant)
        return [] if allowance is None else allowance.told(time.monotonic())

    def enter(self, tenant: str, running: int) -> None:
        """A request comes while `running` of the tenant's are being accepted or answered. Raises RateLimited."""
        allowance = self._allowances.get(tenant)
        if allowance is not None:
            allowance.enter(running, time.monotonic())

    def spend(self, tenant: str, tokens: int) -> None:
        """So many tokens were read or written for the tenant."""
        allowance = self._allowances.get(tenant)
        if allowance is not None:
            allowance.spend(tokens, time.monotonic())
