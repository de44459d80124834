"""Length traces: Azure, BurstGPT, Mooncake, Vidur, per-request records of a vLLM server, and plain length tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from pagedcli.workloads.readers import Format, Parser, Record, Row

MOONCAKE_BLOCK = 512
"""Tokens of a block that one of Mooncake's `hash_ids` stands for."""


def _named(record: Record, lower: str) -> str:
    """The record's own spelling of a field known by its lower-case name."""
    if lower in record.data:
        return lower
    return next((str(key) for key in record.data if str(key).strip().lower() == lower), lower)


def _lengths(record: Record, prompt: str, output: str, arrival: float | None = None) -> Row:
    into, out = record.tokens(_named(record, prompt)), record.tokens(_named(record, output))
    return Row(record.where, prompt_len=into, output_len=out, arrival=arrival)


def _azure(record: Record) -> Row:
    field = _named(record, "timestamp")
    text = record.text(field)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise record.fault(f"field {field!r} = {text!r}: must be a date and time like 2023-11-16 18:15:46.68") from None
    # Without a zone of its own a time is UTC: a local zone could jump by an hour within the trace.
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return _lengths(record, "contexttokens", "generatedtokens", seconds)


def _burstgpt(record: Record) -> Row:
    row = _lengths(record, "request tokens", "response tokens", record.number(_named(record, "timestamp")))
    # The publishers mark failed requests by 0 response tokens.
    return Row(record.where, drop="failed request (0 response tokens)") if row.output_len == 0 else row


def _mooncake(record: Record) -> Row:
    row = _lengths(record, "input_length", "output_length", record.number("timestamp") / 1000.0)
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise record.fault("field 'hash_ids': must be a list of integers")
    blocks = -(-row.prompt_len // MOONCAKE_BLOCK)
    if len(ids) != blocks:
        raise record.fault(f"field 'hash_ids' has {len(ids)} ids, but input_length = {row.prompt_len} needs {blocks} "
                           f"(one for each {MOONCAKE_BLOCK} tokens)")
    return Row(record.where, prompt_len=row.prompt_len, output_len=row.output_len, arrival=row.arrival,
               block_hashes=tuple(ids))


def _vidur(record: Record) -> Row:
    field = _named(record, "arrived_at")
    arrival = record.number(field) if field in record.data else None
    return _lengths(record, "num_prefill_tokens", "num_decode_tokens", arrival)


def _vllm(record: Record) -> Row:
    return _lengths(record, "input_toks", "output_toks", record.number("arrival_time"))


def _plain(record: Record) -> Row:
    return _lengths(record, "input", "output")


def _plain_long(record: Record) -> Row:
    return _lengths(record, "input_length", "output_length")


def _format(name: str, title: str, fields: str, parse: Parser) -> Format:
    return Format(name, title, frozenset(fields.split(",")), "lengths", parse)


FORMATS: tuple[Format, ...] = (
    _format("azure", "Azure LLM inference trace (CSV)", "timestamp,contexttokens,generatedtokens", _azure),
    _format("burstgpt", "BurstGPT (CSV)", "timestamp,request tokens,response tokens", _burstgpt),
    _format("mooncake", "Mooncake (JSON Lines, prefix hashes)", "timestamp,input_length,output_length,hash_ids",
            _mooncake),
    _format("vidur", "Vidur / Sarathi lengths (CSV)", "num_prefill_tokens,num_decode_tokens", _vidur),
    _format("vllm-requests", "per-request record of a vLLM server (JSON Lines)",
            "input_toks,output_toks,arrival_time", _vllm),
    _format("lengths", "plain lengths (CSV input,output)", "input,output", _plain),
    _format("lengths", "plain lengths (input_length, output_length)", "input_length,output_length", _plain_long),
)


def conversations_from_lengths(turns: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Splits a table of (whole history, answer) lengths into conversations of (query, answer) lengths, tokens.

    Such tables (Sarathi-Serve's ShareGPT) carry no conversation id. A row continues the conversation above it when
    its history is longer than that row's history and answer together; the query is what is left over.
    """
    found: list[list[tuple[int, int]]] = []
    seen = 0
    for history, answer in turns:
        if found and history > seen:
            found[-1].append((history - seen, answer))
        else:
            found.append([(history, answer)])
        seen = history + answer
    return found
