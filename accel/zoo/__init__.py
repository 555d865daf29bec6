"""Models that need no download: embedded ones to look at, and tiny random ones to test with."""
