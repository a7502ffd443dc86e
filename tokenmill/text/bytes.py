"""A tokenizer without a vocabulary to learn: ids 0 to 255 are bytes, 256 begins and 257 ends a text.

For tests of everything that needs a tokenizer and no particular one.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tokenmill.text.pieces import BYTE_LEVEL, byte_alphabet
from tokenmill.text.tokenizer import Tokenizer, Traits

BOS_ID, EOS_ID = 256, 257


def byte_tokenizer() -> Tokenizer:
    vocab = {char: byte for byte, char in byte_alphabet().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    traits = Traits(
        bos_token_id=BOS_ID,
        eos_token_ids=(EOS_ID,),
        prefix_ids=(BOS_ID,),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
    return Tokenizer(backend, BYTE_LEVEL, traits)
