"""Plain prompts: JSON Lines of `{"prompt": "text"}` or `{"prompt_token_ids": [...]}`, output length optional."""

from __future__ import annotations

from pagedcli.workloads.readers import Format, Record, Row

_LENGTH_FIELDS = ("output_len", "output_tokens", "max_tokens")


def parse(record: Record) -> Row:
    """One prompt; `max_tokens` (or `output_len`) is its output length, left to the caller's default when absent."""
    field = next((name for name in _LENGTH_FIELDS if record.data.get(name) is not None), None)
    length = -1 if field is None else record.tokens(field)
    ids = record.data.get("prompt_token_ids")
    if ids is not None:
        if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise record.fault("field 'prompt_token_ids': must be a list of token ids")
        return Row(record.where, prompt_len=len(ids), output_len=length, token_ids=tuple(ids))
    output = record.data.get("output")
    return Row(record.where, prompt=record.text("prompt"), output_len=length,
               output=output if field is None and isinstance(output, str) else None)


FORMAT = Format("prompts", 'prompts (JSON Lines, {"prompt": ...})', frozenset({"prompt"}), "prompts", parse)
IDS_FORMAT = Format("prompt-ids", "prompts as token ids (JSON Lines)", frozenset({"prompt_token_ids"}), "prompts",
                    parse)
