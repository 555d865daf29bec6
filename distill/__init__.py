"""Training: the trunk (autoencoder, base model) on which the distillation methods grow."""
