"""ShareGPT: `[{id, conversations: [{from: human|gpt, value}]}]`; a request is the first question and its answer."""

from __future__ import annotations

from pagedcli.workloads.readers import Format, Record, Row

_USER = frozenset({"human", "user"})
_ASSISTANT = frozenset({"gpt", "chatgpt", "bing", "bard", "assistant", "model"})
_SKIPPED = frozenset({"system"})
_TOOLS = frozenset({"function_call", "observation", "tool", "function"})


def _turns(record: Record) -> list[tuple[str, str]]:
    """(speaker, text) of each turn; speaker is `human`, `gpt`, or a tool's own role."""
    listed = record.get("conversations")
    if not isinstance(listed, list):
        raise record.fault(f"field 'conversations' = {type(listed).__name__}: must be a list of turns")
    turns: list[tuple[str, str]] = []
    for number, turn in enumerate(listed, start=1):
        if not isinstance(turn, dict):
            raise record.fault(f"field 'conversations' turn {number}: must be an object")
        role, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(role, str) or not isinstance(value, str):
            raise record.fault(f"field 'conversations' turn {number}: needs 'from' and 'value' strings")
        role = role.strip().lower()
        if role in _SKIPPED:
            continue
        turns.append(("human" if role in _USER else "gpt" if role in _ASSISTANT else role, value))
    return turns


def parse(record: Record) -> Row:
    """A conversation as a row; one without a usable first question and answer carries the reason in `drop`."""
    turns = _turns(record)
    row_id = record.data.get("id")
    reason = _unusable(turns)
    return Row(record.where, name=None if row_id is None else str(row_id), turns=tuple(turns), drop=reason,
               prompt=None if reason else turns[0][1], output=None if reason else turns[1][1])


def _unusable(turns: list[tuple[str, str]]) -> str | None:
    if len(turns) < 2:
        return "fewer than two turns"
    if turns[0][0] != "human":
        return "first turn is not the user's"
    if turns[1][0] in _TOOLS:
        return "first answer is a tool call"
    if turns[1][0] != "gpt":
        return "second turn is not the assistant's"
    if not turns[0][1].strip():
        return "empty first question"
    if not turns[1][1].strip():
        return "empty first answer"
    return None


FORMAT = Format("sharegpt", "ShareGPT conversations (JSON)", frozenset({"conversations"}), "conversations", parse)
