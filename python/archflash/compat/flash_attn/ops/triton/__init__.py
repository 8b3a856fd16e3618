"""FlashAttention-2's `ops.triton`: rotary embeddings only."""
