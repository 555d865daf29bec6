"""The core and the techniques."""
