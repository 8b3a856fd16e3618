"""Many threads that call archflash for a long time: the same bits, and no growth."""
