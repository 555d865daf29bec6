"""Figures of quality. Each file holds one; `Figure` in noise_floor.py carries a value with its floor and its N."""
