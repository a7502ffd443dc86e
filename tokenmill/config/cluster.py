"""Description of a cluster, read from the file of `tokenmill up cluster.toml`.

    model = "smollm2:135m"                # as on the command line of `serve`
    slo = "ttft=1s,tpot=50ms"             # latency targets, from which topology and number of replicas are derived

    [[group]]                             # identical replicas; one or more groups
    replicas = "2..6"                     # minimum and maximum, or one number; "0..6" scales to zero
    tp = "auto"                           # tensor parallel ranks of a replica; auto: the planner chooses
    pp = 1                                # pipeline stages of a replica, each of tp ranks
    role = "any"                          # or "prefill", "decode": as with `serve --roles`

    [load]                                # the expected load
    input_len = 512
    output_len = 256
    requests_s = 4.0                      # default: the most that the devices can serve

    [hosts]
    local = true                          # run replicas on this machine too
    local_replicas = 1                    # maximum there; default: 1 with `listen`, otherwise unlimited
    listen = "0.0.0.0:8100"               # address at which `tokenmill host --join` reaches this machine
    key_file = "cluster.key"              # secret shared with the other machines
    ray = "auto"                          # address of a Ray cluster whose nodes run replicas too

All other sections ([server], [model], [cache], [scheduler], [ops], [sampling]) are those of any settings file, for
example kv_disk, kv_disk_gb and kv_host_gb in [cache].
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tokenmill.config.durations import seconds_of
from tokenmill.errors import InvalidConfig

MAX_REPLICAS = 64
MAX_TP = 64
MAX_PP = 64
MAX_FILE_BYTES = 1 << 20
ROLES = ("any", "prefill", "decode")
FORMER_LOCAL_REPLICAS = "seats"  # deprecated name of local_replicas, still accepted
OWN_TABLES = ("group", "load", "hosts", "scale")


@dataclass(frozen=True)
class GroupConfig:
    """A group of identical replicas."""

    least: int = 1
    most: int = 1
    tp: int | None = None  # ranks per stage; None: the planner chooses
    role: str = "any"  # see ROLES
    pp: int = 1  # stages per replica


@dataclass(frozen=True)
class ExpectedLoad:
    """The load that a cluster is planned for."""

    input_len: int = 512
    output_len: int = 256
    requests_s: float | None = None  # None: the most that the devices can serve


@dataclass(frozen=True)
class HostsConfig:
    """The machines of a cluster."""

    local: bool = True
    local_replicas: int | None = None  # maximum on this machine; None: unlimited, or 1 with `listen`
    listen: str | None = None  # address and port at which hosts join; None: no other hosts
    key_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    ray: str | None = None  # address of a Ray cluster, or "auto", or "local"


@dataclass(frozen=True)
class ClusterConfig:
    groups: tuple[GroupConfig, ...] = (GroupConfig(),)
    load: ExpectedLoad = ExpectedLoad()
    hosts: HostsConfig = HostsConfig()
    idle_s: float = 60.0  # time without requests after which the last replica stops, if the minimum is 0
    deprecated: tuple[str, ...] = ()  # warnings about deprecated names

    @property
    def num_local(self) -> int:
        """Maximum number of replicas on this machine."""
        if not self.hosts.local:
            return 0
        return min(self.most, self.hosts.local_replicas or (self.most if self.hosts.listen is None else 1))

    @property
    def least(self) -> int:
        return sum(group.least for group in self.groups)

    @property
    def most(self) -> int:
        return sum(group.most for group in self.groups)

    @property
    def has_roles(self) -> bool:
        return any(group.role != "any" for group in self.groups)


def read_tables(path: Path) -> dict[str, Any]:
    """Read a TOML file; raise InvalidConfig if that fails."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidConfig(f"{path} is too large for a settings file")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise InvalidConfig(f"{path} can't be read: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise InvalidConfig(f"{path} is not valid TOML: {problem}") from problem


def settings_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a cluster's file that are ordinary settings, with the short forms `model` and `slo`
    expanded."""
    found = {name: table for name, table in tables.items() if name not in OWN_TABLES}
    for short, section in (("model", "model"), ("slo", "scheduler")):
        value = found.get(short)
        if isinstance(value, str):
            del found[short]
            found[section] = {**found.get(section, {}), short: value}
        elif value is not None and not isinstance(value, dict):
            raise InvalidConfig(f"{short} must be text, got {value!r}", param=short, hint=f'write {short} = "..."')
    return found


def read_cluster(path: Path) -> ClusterConfig:
    """Read groups, load and hosts from a cluster's file; raise InvalidConfig for an invalid entry."""
    tables = read_tables(path)
    groups = tables.get("group", [{}])
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise InvalidConfig(f"{path}: write [[group]] and its keys below, once per group", param="group")
    scale = _table(path, tables, "scale", ("idle",))
    idle_s = seconds_of(scale.get("idle", "60s"))
    if idle_s is None or not 0 < idle_s <= 86_400:
        raise InvalidConfig(f"{path}: [scale] idle must be a duration such as 60s", param="idle")
    hosts = _hosts(path, tables)
    uses_former = FORMER_LOCAL_REPLICAS in tables.get("hosts", {})
    cluster = ClusterConfig(
        tuple(_group(path, group) for group in groups),
        _load(path, tables),
        hosts,
        idle_s,
        (f"{path}: [hosts] {FORMER_LOCAL_REPLICAS} is deprecated: write local_replicas",) if uses_former else (),
    )
    if not 1 <= cluster.most <= MAX_REPLICAS:
        raise InvalidConfig(
            f"{path}: a cluster must have 1 to {MAX_REPLICAS} replicas, not {cluster.most}", param="replicas"
        )
    return cluster


def _group(path: Path, table: Mapping[str, Any]) -> GroupConfig:
    _require_known(path, "[[group]]", table, ("replicas", "tp", "pp", "role"))
    least, most = replica_range(table.get("replicas", 1), f"{path}: [[group]] ")
    tp = table.get("tp", "auto")
    if tp != "auto" and not (type(tp) is int and 1 <= tp <= MAX_TP):
        raise InvalidConfig(f"{path}: [[group]] tp must be auto or 1 to {MAX_TP}, got {tp!r}", param="tp")
    pp = table.get("pp", 1)
    if not (type(pp) is int and 1 <= pp <= MAX_PP):
        raise InvalidConfig(f"{path}: [[group]] pp must be 1 to {MAX_PP}, got {pp!r}", param="pp")
    role = table.get("role", "any")
    if role not in ROLES:
        raise InvalidConfig(f"{path}: [[group]] role must be any, prefill or decode, got {role!r}", param="role")
    if role != "any" and not least:
        raise InvalidConfig(
            f"{path}: [[group]] a {role} group needs at least one replica", param="replicas", hint='replicas = "1..4"'
        )
    return GroupConfig(least, most, None if tp == "auto" else tp, role, pp)


def replica_range(given: Any, where: str = "") -> tuple[int, int]:
    """Return the minimum and maximum number of replicas, given as `3`, `"3"` or `"2..6"`."""
    ends = str(given).split("..") if type(given) in (int, str) else []
    if len(ends) in (1, 2) and all(end.strip().isdecimal() and len(end) < 5 for end in ends):
        least, most = int(ends[0]), int(ends[-1])
        if least <= most <= MAX_REPLICAS and most >= 1:
            return least, most
    raise InvalidConfig(
        f"{where}replicas must be a number up to {MAX_REPLICAS} or a range such as 2..6, got {given!r}",
        param="replicas",
        hint='write replicas = 3, or replicas = "2..6"',
    )


def _load(path: Path, tables: Mapping[str, Any]) -> ExpectedLoad:
    table = _table(path, tables, "load", [field.name for field in fields(ExpectedLoad)])
    for name in ("input_len", "output_len"):
        if name in table and not (type(table[name]) is int and 1 <= table[name] <= 1 << 24):
            raise InvalidConfig(f"{path}: [load] {name} must be a number of tokens, got {table[name]!r}", param=name)
    asked = table.get("requests_s")
    if asked is not None and not (type(asked) in (int, float) and 0 < asked <= 1e9):
        raise InvalidConfig(f"{path}: [load] requests_s must be a number above 0, got {asked!r}", param="requests_s")
    return replace(ExpectedLoad(), **table)


def _hosts(path: Path, tables: Mapping[str, Any]) -> HostsConfig:
    table = dict(_table(path, tables, "hosts", [*(field.name for field in fields(HostsConfig)), FORMER_LOCAL_REPLICAS]))
    if FORMER_LOCAL_REPLICAS in table:
        former = table.pop(FORMER_LOCAL_REPLICAS)
        table.setdefault("local_replicas", former)
    for name, kind in (("local", bool), ("listen", str), ("key_file", str), ("tls_cert", str), ("tls_key", str),
                       ("ray", str)):  # fmt: skip
        if name in table and type(table[name]) is not kind:
            raise InvalidConfig(f"{path}: [hosts] {name} must be a {kind.__name__}, got {table[name]!r}", param=name)
    for name in ("key_file", "tls_cert", "tls_key"):
        if name in table:
            table[name] = path.parent / Path(table[name]).expanduser()
    number = table.get("local_replicas")
    if number is not None and not (type(number) is int and 1 <= number <= MAX_REPLICAS):
        raise InvalidConfig(
            f"{path}: [hosts] local_replicas must be 1 to {MAX_REPLICAS}, got {number!r}", param="local_replicas"
        )
    hosts = HostsConfig(**table)
    if hosts.listen is not None:
        listen_address(hosts.listen)
    if hosts.listen is not None and hosts.key_file is None:
        raise InvalidConfig(
            f"{path}: [hosts] listen needs a key_file: hosts that join must prove that they know the key",
            param="key_file",
            hint="head -c 32 /dev/urandom | base64 > cluster.key",
        )
    if (hosts.tls_cert is None) != (hosts.tls_key is None):
        raise InvalidConfig(f"{path}: [hosts] tls_cert and tls_key must be given together", param="tls_cert")
    if hosts.listen is None and hosts.ray is not None:
        raise InvalidConfig(f"{path}: [hosts] ray needs listen: Ray nodes join at that address", param="listen")
    if hosts.listen is None and not hosts.local:
        raise InvalidConfig(
            f"{path}: [hosts] local = false needs listen: otherwise there is no machine for replicas", param="local"
        )
    return hosts


def listen_address(text: str) -> tuple[str, int]:
    """Parse an address and port such as `0.0.0.0:8100` or `[::]:8100`."""
    address, colon, port = text.rpartition(":")
    if not colon or not address or not port.isdecimal() or not int(port) <= 65_535:
        raise InvalidConfig(f"{text!r} is not an address and port", param="listen", hint="write 0.0.0.0:8100")
    return address.removeprefix("[").removesuffix("]"), int(port)


def _table(path: Path, tables: Mapping[str, Any], name: str, known: Any) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise InvalidConfig(f"{path}: {name} must be a section: write [{name}] and its keys below", param=name)
    _require_known(path, f"[{name}]", table, known)
    return table


def _require_known(path: Path, where: str, table: Mapping[str, Any], known: Any) -> None:
    for key in table:
        if key not in known:
            near = get_close_matches(key, list(known), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(known)}"
            raise InvalidConfig(f"{path}: {where} has no key {key!r}{hint}", param=key)
