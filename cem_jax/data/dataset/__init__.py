"""Dataset directories and the batches read from them."""
