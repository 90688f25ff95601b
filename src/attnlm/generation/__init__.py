"""The generation of text with a model."""
