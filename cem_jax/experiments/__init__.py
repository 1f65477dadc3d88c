"""The paper's experiments: its synthetic study, its figures."""
