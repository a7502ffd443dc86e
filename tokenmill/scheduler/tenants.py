"""Fair shares: for each tenant a counter of the device seconds it was given, divided by its weight.

Every token that a step computes for a tenant raises its counter by what the step-time model says it costs
(`step_time.py`); tokens found in the prefix cache are not computed and cost nothing. Of those that wait, the tenant
with the smallest counter goes first (VTC, arXiv 2401.00588). The counter of a tenant that was idle is raised to a
quantum below the others': idle time is not saved up, but a tenant that asks seldom goes before those that ask all the
time.

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
    """The device time that one tenant was given so far."""

    __slots__ = ("counter_s", "num_open", "tenant")

    def __init__(self, tenant: Tenant, counter_s: float) -> None:
        self.tenant = tenant
        self.counter_s = counter_s  # seconds of the device, over the tenant's weight
        self.num_open = 0  # requests that wait or run


class Tenants:
    """Accounts of the tenants that have requests, or whose counters are ahead of those."""

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
        """Return the summed weight of all tenants that have requests."""
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
        """Raise the counter of a tenant that had nothing waiting until now."""
        account.counter_s = max(account.counter_s, self.virtual_s - QUANTUM_S)

    def note_start(self, account: TenantAccount) -> None:
        """Note that a group of the tenant with the smallest counter starts."""
        self.virtual_s = max(self.virtual_s, account.counter_s)

    def __len__(self) -> int:
        return len(self._accounts)
