"""Tenants and what they were given: a counter for each, in seconds of the device over its weight.

Every token that a step computes for a tenant raises its counter by what the step-time model says it costs
(`step_time.py`); tokens found in the prefix cache are not computed and cost nothing. Of those that wait, the tenant
with the smallest counter goes first (VTC, arXiv 2401.00588). A tenant that had nothing to do is lifted to a quantum
before where the others are: idle time is not saved up, but who asks seldom goes before who asks all the time.

    counter  │ A ████████████████
             │ B ████████████████▒▒         the next to start: C, then A, then B
             │ C ██████████████
             └────────────────┴─ virtual time: the smallest counter that was served last

So of two tenants that both always have something waiting, neither is ahead of the other by more than what one can have
running at a time, and a quantum. A tenant alone is not counted at all.
"""

from __future__ import annotations

from tokenmill.types import Tenant

QUANTUM_S = 0.2  # of the device, over the weight: so far a tenant may get ahead of the others before it is their turn


class TenantAccount:
    """What one tenant was given so far."""

    __slots__ = ("counter_s", "num_open", "tenant")

    def __init__(self, tenant: Tenant, counter_s: float) -> None:
        self.tenant = tenant
        self.counter_s = counter_s  # seconds of the device, over the tenant's weight
        self.num_open = 0  # requests that wait or run


class Tenants:
    """The accounts of tenants that have requests, or are ahead of those that have."""

    def __init__(self) -> None:
        self._accounts: dict[str, TenantAccount] = {}
        self._num_open = 0  # tenants with requests
        self.virtual_s = 0.0

    @property
    def is_contended(self) -> bool:
        """Tell whether more than one tenant has requests: otherwise there is nothing to share."""
        return self._num_open > 1

    @property
    def open_weight(self) -> float:
        """The weight of all tenants that have requests."""
        return sum(one.tenant.weight for one in self._accounts.values() if one.num_open)

    def open(self, tenant: Tenant) -> TenantAccount:
        """Count one more request of a tenant. Its newest weight and limit hold."""
        account = self._accounts.get(tenant.id)
        if account is None:
            account = self._accounts[tenant.id] = TenantAccount(tenant, self.virtual_s - QUANTUM_S)
        account.tenant = tenant
        self._num_open += account.num_open == 0
        account.num_open += 1
        return account

    def close(self, account: TenantAccount) -> None:
        """Count one request less; an account that says nothing any more is forgotten."""
        account.num_open -= 1
        if account.num_open:
            return
        self._num_open -= 1
        if not self._num_open:
            self._accounts.clear()
            self.virtual_s = 0.0
        elif account.counter_s <= self.virtual_s - QUANTUM_S:
            del self._accounts[account.tenant.id]

    def charge(self, account: TenantAccount, seconds: float) -> None:
        account.counter_s += seconds / account.tenant.weight

    def lift(self, account: TenantAccount) -> None:
        """A tenant that had nothing waiting has something now."""
        account.counter_s = max(account.counter_s, self.virtual_s - QUANTUM_S)

    def note_start(self, account: TenantAccount) -> None:
        """A group of the tenant whose turn it is starts."""
        self.virtual_s = max(self.virtual_s, account.counter_s)

    def __len__(self) -> int:
        return len(self._accounts)
