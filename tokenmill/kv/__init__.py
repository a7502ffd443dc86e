"""The KV cache: the bookkeeping of blocks and block tables (`blocks`, `cache`), how layers share blocks (`layout`), the
tensors (`storage`), and copying blocks to and from tiers (`traffic`, `records`, `tiers`)."""
