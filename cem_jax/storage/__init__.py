"""Files and directories, local or behind URLs."""
