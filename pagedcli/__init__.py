"""pagedcli: offline LLM batch generation on a paged KV cache, and the measurement of KV-cache memory."""

__version__ = "0.1.0"
