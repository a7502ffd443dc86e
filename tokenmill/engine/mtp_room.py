"""The memory of a head that predicts further tokens (`arch/mtp.py`), beside its model's: for engine and planner alike.

Embedding and head matrix are the model's own. Its cache has one layer, and blocks for as many tokens as the model's.
"""

from __future__ import annotations

from tokenmill.arch.cost import WeightParts, num_parameters
from tokenmill.arch.mtp import MAX_KEPT_STATES, has_mtp_head, mtp_head, mtp_parameters
from tokenmill.arch.outline import Model
from tokenmill.arch.spec import ModelSpec
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import CacheDtypes, KVLayout

MTP = "mtp"  # what `speculate` calls it


def mtp_bytes(spec: Model, parts: WeightParts, max_rows: int) -> int:
    """Bytes of a model's head, in the precision that the model's weights have on average, and of the states that it has
    not taken yet."""
    if not isinstance(spec, ModelSpec) or not has_mtp_head(spec):
        problem = f"speculate mtp was asked for, but heads that predict further tokens of {spec.family} are not read"
        raise InvalidConfig(problem, param="speculate")
    weights = int(parts.total * mtp_parameters(spec) / num_parameters(spec))
    return weights + max_rows * MAX_KEPT_STATES * spec.hidden_size * 4


def mtp_blocks(num_blocks: int, layout: KVLayout) -> int:
    """Blocks of the head's own pool beside a model's pool of `num_blocks` in this layout."""
    return 1 + (num_blocks - 1) // len(layout.paged)


def mtp_block_bytes(spec: ModelSpec, dtypes: CacheDtypes, block_size: int) -> int:
    """What the head's pool takes for each block of the model's."""
    head = KVLayout.from_spec(mtp_head(spec), dtypes).block_bytes(block_size)
    return -(-head // len(KVLayout.from_spec(spec, dtypes).paged))
