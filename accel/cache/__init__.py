"""Reuse between steps and calls."""
