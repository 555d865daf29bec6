"""The emoji set: how it is made, and the part of it that travels with the package."""
