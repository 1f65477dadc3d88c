"""From raw text to training batches: tokenizer, `cem prepare`, dataset directories, loaders."""
