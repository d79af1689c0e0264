"""How codes lie in memory: 4-bit weights, the KV cache, and the packing that both share."""
