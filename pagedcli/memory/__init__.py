"""KV memory as integers: blocks, tables, reference counts, policies. Never sees a tensor."""
