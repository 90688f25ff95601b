"""Whole tasks: training a model, evaluating it, comparing several models, and others."""
