"""Where blocks of the KV cache are kept beside the pool: host memory (`host`), a folder (`disk`), other cores (`peer`).

A block has a name (cache group and hash of all tokens up to its end), so whoever has one has the right one, and a block
that can't be had is computed: no failure of a tier is a failure of a request. `traffic` moves blocks in threads of its
own, beside the steps.
"""
