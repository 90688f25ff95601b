"""Whole tasks: train, evaluate, ladder."""
