"""The memory of a head that predicts further tokens (`arch/mtp.py`), used by the engine and the planner.

The head shares the model's embedding and output matrix. Its cache has one layer, and blocks for as many tokens as the
model's.
"""

from __future__ import annotations

from tokenmill.arch.cost import WeightParts, num_parameters
from tokenmill.arch.mtp import MAX_KEPT_STATES, has_mtp_head, mtp_head, mtp_parameters
from tokenmill.arch.outline import Model
from tokenmill.arch.spec import ModelSpec
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import CacheDtypes, KVLayout

MTP = "mtp"  # the value of the setting `speculate`


def mtp_bytes(spec: Model, parts: WeightParts, max_rows: int) -> int:
    """Return the bytes of a model's head, in the average precision of the model's weights, and of the hidden states
    waiting for it."""
    if not isinstance(spec, ModelSpec) or not has_mtp_head(spec):
        problem = f"speculate mtp is not supported for {spec.family}: its extra prediction heads are not read"
        raise InvalidConfig(problem, param="speculate")
    weights = int(parts.total * mtp_parameters(spec) / num_parameters(spec))
    return weights + max_rows * MAX_KEPT_STATES * spec.hidden_size * 4


def mtp_blocks(num_blocks: int, layout: KVLayout) -> int:
    """Return the number of blocks of the head's pool for a model's pool of `num_blocks` in this layout."""
    return 1 + (num_blocks - 1) // len(layout.paged)


def mtp_block_bytes(spec: ModelSpec, dtypes: CacheDtypes, block_size: int) -> int:
    """Return the bytes of the head's pool for each block of the model's."""
    head = KVLayout.from_spec(mtp_head(spec), dtypes).block_bytes(block_size)
    return -(-head // len(KVLayout.from_spec(spec, dtypes).paged))
