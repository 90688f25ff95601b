"""Conversion of text to ids and back."""
