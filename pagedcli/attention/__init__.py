"""Attention over paged keys and values: the only code that knows the cache's layout in memory."""
