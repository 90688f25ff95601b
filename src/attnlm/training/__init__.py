"""The loop, the optimizer, the validation loss."""
