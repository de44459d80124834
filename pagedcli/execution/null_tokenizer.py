"""A tokenizer with one id a byte, for `--model null`."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pagedcli.execution.tokenizer import Tokenizer


def byte_tokenizer() -> Tokenizer:
    """256 ids in the order of the byte-level alphabet, printable characters first; nothing ends a generation."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, frozenset(), {}, None)
