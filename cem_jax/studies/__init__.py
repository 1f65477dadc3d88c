"""Studies of many runs: the paper's figures and its synthetic experiment."""
