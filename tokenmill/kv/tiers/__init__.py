"""KV cache tiers beside the pool: host memory (`host`), a folder (`disk`), other cores (`peer`, `nixl`).

A block's name (cache group and hash of all tokens up to its end) identifies its contents, so a block of that name is
right wherever it comes from. Blocks that can't be fetched are computed: no failure of a tier fails a request. `traffic`
moves blocks in threads of its own, beside the steps.
"""
