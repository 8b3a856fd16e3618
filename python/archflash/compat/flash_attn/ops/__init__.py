"""FlashAttention-2's `ops`: rotary embeddings only."""
