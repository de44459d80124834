"""Alpaca: `instruction, input, output`; the prompt is the instruction and, below it, the input."""

from __future__ import annotations

from pagedcli.workloads.readers import Format, Record, Row


def parse(record: Record) -> Row:
    """One instruction as a row of text. An empty instruction or output is a reason to drop it."""
    instruction, output = record.text("instruction"), record.text("output")
    extra = record.data.get("input") or ""
    if not isinstance(extra, str):
        raise record.fault(f"field 'input' = {extra!r}: must be a string")
    if not instruction.strip():
        return Row(record.where, drop="empty instruction")
    if not output.strip():
        return Row(record.where, drop="empty output")
    return Row(record.where, prompt=f"{instruction}\n{extra}" if extra.strip() else instruction, output=output)


FORMAT = Format("alpaca", "Alpaca instructions (JSON)", frozenset({"instruction", "output"}), "text", parse)
