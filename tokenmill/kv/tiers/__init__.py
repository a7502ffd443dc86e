"""KV cache tiers in addition to the pool: host memory (`host`), a folder (`disk`), other cores (`peer`, `nixl`).

A block's name (cache group and hash of all tokens up to its end) identifies its contents, so a block of that name is
correct no matter which tier it comes from. Blocks that can't be fetched are computed: a failing tier never fails a
request. `traffic` copies blocks in background threads while steps run.
"""
