"""From raw text to a dataset directory: what `cem prepare` and `cem tokenizer` do."""
