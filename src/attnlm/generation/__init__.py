"""From a model to text."""
