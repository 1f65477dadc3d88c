"""One training step and what it is made of, evaluation, and the measurements of a model."""
