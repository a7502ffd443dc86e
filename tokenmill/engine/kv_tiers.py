"""Setup of a core's KV tiers from its settings, and the digest of everything that a block's bytes depend on.

A block may be used by any core that would compute the same bytes. The digest covers the weights, the precisions, the
kernels and the block layout. Tokens, tenant and adapter are covered by the block's own hash.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig
from tokenmill.kv.cache import KVCache
from tokenmill.kv.records import BlockRecords, DeviceRecords, GpuCopyStream, HostRecords
from tokenmill.kv.storage import KVStorage
from tokenmill.kv.tiers.disk import DiskTier
from tokenmill.kv.tiers.host import HostTier
from tokenmill.kv.tiers.nixl import MemoryAgent
from tokenmill.kv.traffic import BlockTraffic, KeepingTier
from tokenmill.models.rope import rope_frequencies
from tokenmill.ops import cpu as native_kernels
from tokenmill.ops.cpu.packing import layout_digest
from tokenmill.store import is_scripted
from tokenmill.store.layout import store_root
from tokenmill.version import VERSION
from tokenmill.weights.locate import locate
from tokenmill.weights.packed_cache import identity

GB = 1_000_000_000
DEFAULT_DISK_GB = 16.0


BlocksDigest = Callable[[bool], bytes]  # (whether it is for a folder on this machine) → digest
MakeRecords = Callable[[], BlockRecords]


def blocks_digest(config: EngineConfig, spec: ModelSpec, model_path: Path, is_for_disk: bool) -> bytes:
    """Return the digest of everything that a block's bytes depend on besides its hash. `config`: resolved.
    `is_for_disk`: include the identity of the weight files, because blocks on disk outlive the engine and the files may
    be changed in place; between machines file times can't be compared."""
    model, cache, ops = config.model, config.cache, config.ops
    files: list[object] = [model.seed]
    if is_scripted(model.model):
        files = [hashlib.sha256(model_path.read_bytes()).hexdigest()]
    elif model.load_format != "dummy":
        found = [identity(file) for file in locate(model_path).files]
        files = [one.key if is_for_disk else (one.num_bytes, one.content) for one in found]
    kernels: tuple[object, ...] = (torch.__version__,)
    if ops.backend == "cpu":
        kernels = (native_kernels.instruction_set(), layout_digest())
    elif ops.device == "cuda":
        kernels = (torch.__version__, torch.cuda.get_device_name())
    assert model.max_context is not None
    # Some RoPE variants depend on the length of the context; only the resulting frequencies matter.
    ropes = [rope_frequencies(rope, model.max_context).tolist() for rope in spec.ropes]
    num_parts = (
        1 if ops.backend == "cpu" else config.parallel.tp
    )  # native kernels: the same bits on any number of ranks
    facts = (
        *(VERSION, spec, files, kernels, ropes, model.dtype, model.quantization),
        *(cache.tokens_per_block, cache.kv_dtype, ops.device, ops.backend),
        *(ops.activation_bits, ops.deterministic, num_parts),
    )
    return hashlib.sha256(repr(facts).encode()).digest()


def may_move_blocks(config: EngineConfig, spec: ModelSpec, address: str) -> bool:
    """Tell whether the blocks of a model on several ranks are stored in tiers or served to other cores."""
    from tokenmill.engine.ranked_blocks import ranked_block_limits  # imported only if there are several ranks

    cache = config.cache
    is_configured = bool(cache.kv_disk or cache.kv_disk_gb or (address and cache.prefix_caching))
    return is_configured and ranked_block_limits(config.parallel, spec, config.ops.device) is None


def block_traffic(
    config: EngineConfig,
    storage: KVStorage,
    cache: KVCache,
    digest: BlocksDigest,
    address: str,
    make_own_records: MakeRecords | None = None,
) -> BlockTraffic | None:
    """Make the object that moves a core's blocks to and from tiers; None if there are no tiers. `address`: the socket
    at which other cores can fetch blocks; empty: none. `make_own_records`: makes the accessor that copies blocks, by
    default the one of `storage`."""
    settings, regions = config.cache, [rule.region for rule in cache.rules]
    digest = functools.cache(digest)  # reads files, so it is computed on first use

    # The CUDA stream of this thread, which launches steps; threads that copy blocks use other streams.
    steps = torch.cuda.current_stream(storage.device) if storage.device.type == "cuda" else None

    def make_records() -> BlockRecords:
        if make_own_records is not None:
            return make_own_records()
        return HostRecords(storage) if steps is None else DeviceRecords(storage, GpuCopyStream(steps))

    tiers: list[KeepingTier] = []
    host: HostTier | None = None
    if settings.kv_host_gb:
        records = make_records()
        host = HostTier(records.empty, records.sizes, regions, int(settings.kv_host_gb * GB))
    if settings.kv_disk or settings.kv_disk_gb:
        folder = Path(settings.kv_disk).expanduser() if settings.kv_disk else store_root() / "kv"
        tiers.append(DiskTier(folder, digest(True), int((settings.kv_disk_gb or DEFAULT_DISK_GB) * GB)))
    if host is None and not tiers and not (address and cache.prefix_caching):
        return None
    agent = None
    if address and cache.prefix_caching and settings.kv_transfer == "nixl":
        agent = MemoryAgent(make_records(), regions)
    between_cores = functools.partial(digest, False)
    address = address if cache.prefix_caching else ""
    return BlockTraffic(make_records, cache.prefix, regions, tiers, host, between_cores, address, agent)
