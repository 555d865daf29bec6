"""Makes diffusers pipelines generate faster, and measures what the speed cost."""
