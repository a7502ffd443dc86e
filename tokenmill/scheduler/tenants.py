"""Fair sharing: a counter for each tenant of the device seconds it has used, divided by its weight.

Every token that a step computes for a tenant raises its counter by the cost that the step-time model estimates
(`step_time.py`); tokens found in the prefix cache cost nothing. Of the waiting tenants, the one with the smallest
counter goes first (VTC, arXiv 2401.00588). The counter of a tenant that was idle is raised to a quantum below the
others': idle time is not saved up, but a tenant with few requests goes before those with many.

    counter  │ A ████████████████
             │ B ████████████████▒▒         the next to start: C, then A, then B
             │ C ██████████████
             └────────────────┴─ virtual time: the smallest counter that was served last

So of two tenants that always have waiting requests, neither is ahead of the other by more than a quantum and the cost
of what one can run at a time. A single tenant is not charged at all.
"""

from __future__ import annotations

from tokenmill.types import Tenant

QUANTUM_S = 0.2  # device seconds over the weight by which a tenant may get ahead before the others go first


class TenantAccount:
    """The device time that one tenant has used."""

    __slots__ = ("counter_s", "num_open", "tenant")

    def __init__(self, tenant: Tenant, counter_s: float) -> None:
        self.tenant = tenant
        self.counter_s = counter_s  # device seconds over the tenant's weight
        self.num_open = 0  # waiting and running requests


class Tenants:
    """The accounts of the tenants that have requests, or whose counters are ahead of those."""

    def __init__(self) -> None:
        self._accounts: dict[str, TenantAccount] = {}
        self._num_open = 0  # tenants with requests
        self.virtual_s = 0.0

    @property
    def is_contended(self) -> bool:
        """True if more than one tenant has requests."""
        return self._num_open > 1

    @property
    def open_weight(self) -> float:
        """The total weight of all tenants that have requests."""
        return sum(one.tenant.weight for one in self._accounts.values() if one.num_open)

    def open(self, tenant: Tenant) -> TenantAccount:
        """Count one more request of a tenant, and use its newest weight and limit."""
        account = self._accounts.get(tenant.id)
        if account is None:
            account = self._accounts[tenant.id] = TenantAccount(tenant, self.virtual_s - QUANTUM_S)
        account.tenant = tenant
        self._num_open += account.num_open == 0
        account.num_open += 1
        return account

    def close(self, account: TenantAccount) -> None:
        """Count one request less; delete an account whose counter no longer matters."""
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
        """Raise the counter of a tenant that had no waiting requests until now."""
        account.counter_s = max(account.counter_s, self.virtual_s - QUANTUM_S)

    def note_start(self, account: TenantAccount) -> None:
        """Note that a group of the tenant with the smallest counter starts."""
        self.virtual_s = max(self.virtual_s, account.counter_s)

    def __len__(self) -> int:
        return len(self._accounts)
