"""FlashAttention-2's `layers`: rotary embeddings only."""
