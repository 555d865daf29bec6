"""Measuring: what an image is worth, what it cost to make, and how to report both together."""
